package main

import (
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/pflag"

	"kvepp/internal/metrics"
	"kvepp/router/record"
)

// recording are the flags of the file that "kvepp replay" reads.
type recording struct {
	recordFile     string // empty: nothing is recorded
	recordMaxBytes int64
	recordFiles    int
	recordHashes   string
}

// Values of --record-hashes.
const (
	keyedHashes = "keyed"
	plainHashes = "plain"
)

// minRecordFile is the least share of --record-max-bytes of one file: room for the line of a long prompt.
const minRecordFile = 1 << 20

func (r *recording) add(f *pflag.FlagSet) {
	f.StringVar(&r.recordFile, "record", "",
		"`FILE` to which kvepp writes its traffic for \"kvepp replay --format dynamo\": block hashes, token counts, "+
			"times and workers, no text. kvepp then tokenizes prompts in every --router-mode. Empty: none")
	f.Int64Var(&r.recordMaxBytes, "record-max-bytes", 1<<30,
		"how many `BYTES` all files of --record take at most; kvepp removes the oldest file then")
	f.IntVar(&r.recordFiles, "record-files", 4,
		"how many files --record has at most, `N`: FILE, FILE.1 and so on, the oldest last")
	f.StringVar(&r.recordHashes, "record-hashes", keyedHashes,
		"the block hashes in --record, `KIND`: keyed (with a random key that ends with the process, so that they do "+
			"not reveal prompts) or plain (those of KV events; readers can then test whether a prompt that "+
			"they know was sent)")
	values(f, "record-hashes", keyedHashes, plainHashes)
}

func (r *recording) check() error {
	switch {
	case r.recordFiles < 1 || r.recordFiles > 1000:
		return fmt.Errorf("--record-files %d: must be 1 to 1000", r.recordFiles)
	case r.recordMaxBytes < int64(r.recordFiles)*minRecordFile:
		return fmt.Errorf("--record-max-bytes %d: must be at least %d for each of --record-files", r.recordMaxBytes,
			minRecordFile)
	}
	return oneOf("record-hashes", r.recordHashes, keyedHashes, plainHashes)
}

// open begins to record. It returns nil if nothing is to be recorded, and a function that ends it.
func (r *recording) open(m *metrics.Metrics, log *slog.Logger) (*record.Recorder, func(), error) {
	if r.recordFile == "" {
		return nil, func() {}, nil
	}
	to, err := record.Open(record.Options{
		Path:        r.recordFile,
		MaxBytes:    r.recordMaxBytes,
		Files:       r.recordFiles,
		PlainHashes: r.recordHashes == plainHashes,
	}, log)
	if err != nil {
		return nil, nil, fmt.Errorf("--record: %w; give a file in a folder that kvepp may write to", err)
	}
	for outcome, count := range map[string]*atomic.Int64{
		"written": &to.Counts.Written, "dropped": &to.Counts.Dropped,
		"failed": &to.Counts.Failed, "skipped": &to.Counts.Skipped,
	} {
		m.CounterFunc(
			metrics.RecordedRequests,
			metrics.RecordedRequestsHelp,
			prometheus.Labels{"outcome": outcome},
			func() float64 { return float64(count.Load()) },
		)
	}
	return to, func() { to.Close(2 * time.Second) }, nil
}
