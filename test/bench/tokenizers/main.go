// Command bench-tokenizers encodes texts and chats with kvepp's tokenizer and says what CPU time each took. It is one
// of the engines that compare.py beside it compares, which also describes the protocol on its standard input and
// output; it measures and judges nothing itself. Usage: bench-tokenizers FOLDER
package main

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"unsafe"

	"kvepp/kvblock"
	"kvepp/prompt"
	"kvepp/prompt/body"
)

func main() {
	if err := run(os.Args[1:], os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "bench-tokenizers:", err)
		os.Exit(1)
	}
}

func run(args []string, stdin io.Reader, stdout io.Writer) error {
	if len(args) != 1 {
		return errors.New("usage: bench-tokenizers FOLDER")
	}
	in, out := bufio.NewReader(stdin), bufio.NewWriter(stdout)
	heapBefore, residentBefore := memory()
	start := cpuTime()
	m, err := prompt.Load(args[0], prompt.Options{Engine: prompt.Dynamo}) // it takes the file as it is
	if err != nil {
		return err
	}
	took := cpuTime() - start
	heap, resident := memory()
	fmt.Fprintf(out, `{"load_ns": %d, "resident": %d, "heap": %d}`+"\n", took, resident-residentBefore, heap-heapBefore)
	for {
		if err := out.Flush(); err != nil {
			return err
		}
		operation, err := in.ReadByte()
		if errors.Is(err, io.EOF) {
			runtime.KeepAlive(m)
			return nil
		} else if err != nil {
			return err
		}
		texts, err := readTexts(in)
		if err != nil {
			return err
		}
		switch operation {
		case 'e':
			err = each(out, texts, func(text string) ([]kvblock.Token, error) { return m.Encode(text, true) })
		case 'b':
			bodies := make([][]byte, len(texts)) // a server gets them as bytes
			for i, text := range texts {
				bodies[i] = []byte(text)
			}
			err = each(out, bodies, func(body []byte) ([]kvblock.Token, error) { return chat(m, body) })
		case 'a':
			err = allocations(out, texts, m)
		case '1', '2':
			err = threads(out, texts, m, int(operation-'0'))
		default:
			err = fmt.Errorf("unknown operation %q", operation)
		}
		if err != nil {
			return err
		}
	}
}

// readTexts reads a request's texts: their number, then each with its length before it.
func readTexts(in *bufio.Reader) ([]string, error) {
	count, err := readUint32(in)
	if err != nil {
		return nil, err
	}
	texts := make([]string, count)
	for i := range texts {
		size, err := readUint32(in)
		if err != nil {
			return nil, err
		}
		text := make([]byte, size)
		if _, err := io.ReadFull(in, text); err != nil {
			return nil, err
		}
		texts[i] = string(text)
	}
	return texts, nil
}

func readUint32(in io.Reader) (uint32, error) {
	var raw [4]byte
	_, err := io.ReadFull(in, raw[:])
	return binary.LittleEndian.Uint32(raw[:]), err
}

// each answers every text with its CPU time and ids.
func each[T any](out *bufio.Writer, texts []T, ids func(T) ([]kvblock.Token, error)) error {
	took, all := make([]uint64, len(texts)), make([][]kvblock.Token, len(texts))
	settle()
	for i, text := range texts {
		start := cpuTime()
		var err error
		if all[i], err = ids(text); err != nil {
			return err
		}
		took[i] = cpuTime() - start
	}
	var raw []byte
	for i, ids := range all {
		raw = binary.LittleEndian.AppendUint64(raw[:0], took[i])
		raw = binary.LittleEndian.AppendUint32(raw, uint32(len(ids)))
		for _, id := range ids {
			raw = binary.LittleEndian.AppendUint32(raw, uint32(id))
		}
		if _, err := out.Write(raw); err != nil {
			return err
		}
	}
	return nil
}

// chat is what kvepp does with a request's body: read, render, encode.
func chat(m *prompt.Model, payload []byte) ([]kvblock.Token, error) {
	request, err := body.ParseRequest("/v1/chat/completions", payload)
	if err != nil {
		return nil, err
	}
	prompts, err := m.Tokenize(context.Background(), request)
	if err != nil {
		return nil, err
	}
	return prompts[0].IDs, nil
}

// allocations returns the objects and bytes allocated while encoding all texts.
func allocations(out io.Writer, texts []string, m *prompt.Model) error {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for _, text := range texts {
		if _, err := m.Encode(text, true); err != nil {
			return err
		}
	}
	runtime.ReadMemStats(&after)
	return binary.Write(
		out,
		binary.LittleEndian,
		[2]uint64{after.Mallocs - before.Mallocs, after.TotalAlloc - before.TotalAlloc},
	)
}

// threads returns the CPU time of encoding all texts on n threads at once, each taking every n-th. The process must
// have been started with that many: to change GOMAXPROCS here would empty every sync.Pool.
func threads(out io.Writer, texts []string, m *prompt.Model, n int) error {
	errs := make([]error, n)
	var running sync.WaitGroup
	settle()
	start := cpuTime()
	for t := range n {
		running.Go(func() {
			for i := t; i < len(texts) && errs[t] == nil; i += n {
				_, errs[t] = m.Encode(texts[i], true)
			}
		})
	}
	running.Wait()
	took := cpuTime() - start
	if err := errors.Join(errs...); err != nil {
		return err
	}
	return binary.Write(out, binary.LittleEndian, took)
}

// settle keeps the process busy before the clock starts, as every engine is: when a Go program wakes after a pause, the
// runtime's monitor thread looks at it every 20 microseconds for the first milliseconds, which is no part of encoding.
func settle() {
	const enough = 8_000_000 // ns
	for start := cpuTime(); cpuTime()-start < enough; {
	}
}

// cpuTime is the CPU time of this process, garbage collection included, in nanoseconds. getrusage would count in
// microseconds only.
func cpuTime() uint64 {
	const clockProcessCPUTime = 2
	var t syscall.Timespec
	if _, _, errno := syscall.RawSyscall(syscall.SYS_CLOCK_GETTIME, clockProcessCPUTime, uintptr(unsafe.Pointer(&t)),
		0); errno != 0 {
		return 0
	}
	return uint64(t.Nano())
}

// memory returns what is alive on the heap, and what the process has in RAM, in bytes.
func memory() (heap, resident uint64) {
	var stats runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&stats)
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return stats.HeapAlloc, 0
	}
	for line := range strings.Lines(string(status)) {
		if value, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			kib, _ := strconv.ParseUint(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(value), "kB")), 10, 64)
			resident = kib << 10
		}
	}
	return stats.HeapAlloc, resident
}
