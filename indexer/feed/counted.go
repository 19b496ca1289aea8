package feed

import (
	"kvepp/internal/metrics"
	"kvepp/kvblock"
	"kvepp/zmqsub"
)

// counted lists the kinds of events that the feed counts, with their outcomes. Stores also have the normaliser's drop
// reasons as outcomes.
var counted = map[string][]string{
	"stored":  {"applied", "orphaned", "parent_block_not_found", "index_full", "refused"},
	"removed": {"applied", "unknown_block"},
	"cleared": {"applied"},
	"unknown": {"skipped", "skipped_field"},
	"batch":   {"received", "replayed", "other_rank", "in_dump", "malformed"},
	"query": {
		"all_blocks",
		"events",
		"nothing_missed",
		"refused",
		"malformed",
		"too_long",
		"timed_out",
		"unreachable",
		"outdated",
		"given_up",
	},
	"subscription": {
		"failed",
		"gap",
		"restart",
		"cut",
		string(zmqsub.ReplayComplete),
		string(zmqsub.ReplayTimedOut),
		string(zmqsub.ReplayUnreachable),
		string(zmqsub.ReplayCut),
		string(zmqsub.ReplaySkipped),
	},
}

// initCounted declares the series of counted, at zero.
func initCounted(m *metrics.Metrics) {
	for kind, outcomes := range counted {
		for _, outcome := range outcomes {
			m.InitEvent(kind, outcome)
		}
	}
	for _, reason := range kvblock.DropReasons {
		m.InitEvent("stored", reason)
	}
	m.InitEvent("ignored", kvblock.DropIgnored)
}
