package main

import (
	"log/slog"
	"testing"

	"kvepp/internal/logtest"
	"kvepp/pool"
	"kvepp/router"
	"kvepp/router/admission"
)

// The log names each worker that computes prompts and whose number of KV blocks is not known.
func TestAdmissionWatcher(t *testing.T) {
	var log logtest.Log
	a := admissionWatcher{
		&router.Admission{Controller: admission.New(admission.Config{Fill: 1})},
		slog.New(slog.NewTextHandler(&log, nil)),
	}
	for _, e := range []pool.Endpoint{
		{Name: "known", TotalKVBlocks: 100}, {Name: "decodes", Role: pool.Decode}, {Name: "unknown"},
	} {
		a.WorkerJoined(pool.Worker{Endpoint: &e})
	}
	a.WorkerLeft(7)
	if log.Count("has no effect on this worker") != 1 || log.Count("worker=unknown") != 1 {
		t.Error(&log)
	}
}
