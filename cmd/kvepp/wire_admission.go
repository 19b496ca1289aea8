package main

import (
	"log/slog"

	"kvepp/kvblock"
	"kvepp/pool"
	"kvepp/pool/kube"
	"kvepp/router"
)

// admissionWatcher tells the admission of conversations which workers left, and the operator which workers it has no
// effect on.
type admissionWatcher struct {
	*router.Admission
	log *slog.Logger
}

func (a admissionWatcher) WorkerJoined(w pool.Worker) {
	if w.TotalKVBlocks > 0 || w.Role == pool.Decode || w.Role == pool.Encode {
		return
	}
	a.log.Warn("--router-admission has no effect on this worker, because kvepp does not know its number of KV blocks: "+
		"set totalKvBlocks in the endpoints file, or the Pod's annotation "+
		kube.TotalBlocksAnnotation, "worker", w.String())
}

func (a admissionWatcher) WorkerLeft(w kvblock.Worker) { a.Forget(w) }
