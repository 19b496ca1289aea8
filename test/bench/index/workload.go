package main

import (
	"fmt"
	"io"
	"os"
	"syscall"
	"unsafe"

	"kvepp/indexer"
	"kvepp/kvblock"
)

// A workload is a file of 64-bit words in the machine's byte order, so that a program can map and use it: a header,
// then operations until one of kind 0.
//
//	header   workloadMagic, number of workers
//	store    opStore  | worker<<8 | class<<24 | n<<32, parent (0: none), n times (engine hash, local hash)
//	remove   opRemove | worker<<8 | class<<24 | n<<32, n engine hashes
//	query    opQuery  | n<<32, n local hashes
//	phase    opPhase  | id<<32
//	class    opClass  | kind<<8 | n<<32, n words: the attention window in tokens
//
// Blocks of class 0 are full attention's. All workers have the class that an opClass names, and its blocks are of class
// 1. Dynamo's indexes know no classes, so only kvepp runs such a workload.
//
// The engine hash of a block is its sequence hash, as with Dynamo's publishers, so that engines' names for blocks
// favour no index.
const workloadMagic = 0x3130_776b_7070_6576

const (
	opEnd = iota
	opStore
	opRemove
	opQuery
	opPhase
	opClass
)

// blockTokens is the size of all blocks where classes have windows in tokens.
const blockTokens = 16

// Phases. Operations of phaseMixed run in windows of mixedWindow, the events first and then the queries. Stopping
// Dynamo's writer thread for each single query would cost more than the operations.
const (
	phaseLoad       = iota // the first blocks
	phaseFind              // queries
	phaseMixed             // queries among stores and removals
	phaseRemove            // removals of 8 blocks an event
	phaseRemoveOnes        // removals of 1 block an event
	phaseFull              // micro: queries that match whole
	phaseHalf              // micro: queries that match half
	phaseNone              // micro: queries that do not match
	phaseCut               // hybrid: queries that full attention matches further than the class
	phases
)

const mixedWindow = 256

// operation is one operation of a workload. Its slices are in the mapped file.
type operation struct {
	kind   uint8
	worker kvblock.Worker
	phase  int
	store  kvblock.Stored
	remove kvblock.Removed
	query  []kvblock.LocalHash
	hybrid indexer.Hybrid
}

// workload is a mapped file with a read position.
type workload struct {
	mapped []byte
	words  []uint64
	at     int
}

// openWorkload maps a file. The mapping is outside Go's heap, so that it does not change how often the collector runs.
func openWorkload(path string) (*workload, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if info.Size() < 24 || info.Size()%8 != 0 {
		return nil, fmt.Errorf("%s: %d bytes are no workload", path, info.Size())
	}
	mapped, err := syscall.Mmap(
		int(f.Fd()),
		0,
		int(info.Size()),
		syscall.PROT_READ,
		syscall.MAP_PRIVATE|syscall.MAP_POPULATE,
	)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	w := &workload{mapped: mapped, words: unsafe.Slice((*uint64)(unsafe.Pointer(&mapped[0])), len(mapped)/8)}
	if w.words[0] != workloadMagic {
		return nil, fmt.Errorf("%s: not a workload of this machine", path)
	}
	w.rewind()
	return w, nil
}

func (w *workload) close() error { return syscall.Munmap(w.mapped) }

func (w *workload) rewind() { w.at = 2 }

// next reads the next operation into op, or returns io.EOF. It trusts the file, because generate has just made it.
func (w *workload) next(op *operation) error {
	head := w.words[w.at]
	w.at++
	n := int(head >> 32)
	op.kind, op.worker = uint8(head), kvblock.Worker(head>>8&0xffff)
	tier := kvblock.TierDevice
	if class := int(head >> 24 & 0xff); class > 0 {
		tier = kvblock.ClassTier(class - 1)
	}
	switch op.kind {
	case opStore:
		parent := w.words[w.at]
		op.store = kvblock.Stored{
			HasParent: parent != 0, Parent: kvblock.EngineHash(parent),
			Blocks: unsafe.Slice((*kvblock.StoredBlock)(unsafe.Pointer(&w.words[w.at+1])), n),
			Tier:   tier,
		}
		w.at += 1 + 2*n
	case opRemove:
		op.remove = kvblock.Removed{Hashes: unsafe.Slice((*kvblock.EngineHash)(&w.words[w.at]), n), Tier: tier}
		w.at += n
	case opQuery:
		op.query = unsafe.Slice((*kvblock.LocalHash)(&w.words[w.at]), n)
		w.at += n
	case opPhase:
		op.phase = n
	case opClass:
		op.hybrid = indexer.Hybrid{BlockSize: blockTokens, Classes: kvblock.Classes{{
			Kind: kvblock.ClassKind(head >> 8), Window: uint32(w.words[w.at]), BlockSize: blockTokens}}}
		w.at += n
	case opEnd:
		return io.EOF
	default:
		return fmt.Errorf("operation %d at word %d", op.kind, w.at-1)
	}
	return nil
}
