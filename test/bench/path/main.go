// Command bench-path is `make bench-path`: it measures the cost of an external processor for a request behind a real
// Envoy. It compares kvepp with Envoy alone, with a processor that only sends back what it gets and, on request, with
// the Gateway API's own.
//
// It starts all programs on loopback (itself as that processor and as the upstream), loads them in turn, and prints
// medians and the project's goals. It measures the unchanged kvepp program. One goroutine drives; each connection of a
// load is one more.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"
)

// options are the settings of a run.
type options struct {
	root, kvepp, envoy, model string
	out                       string // the folder for charts; empty: none
	rounds                    int
	length                    time.Duration // of one measurement
	streams, chunks           int           // of server-sent events
	only                      string
	size                      int // size of bodies in KB; 0: all
	connections               int // number of connections; 0: 1, then 64
	// Folders of the Gateway API's endpoint picker and of Kubernetes' programs; empty: without it.
	gaie, kube string
}

func main() {
	if len(os.Args) == 3 && os.Args[1] == "echo" {
		fail(serveEcho(os.Args[2]))
	}
	if len(os.Args) == 3 && os.Args[1] == "upstream" {
		fail(serveUpstream(os.Args[2]))
	}
	var o options
	flag.StringVar(&o.root, "root", ".", "the project's root")
	flag.StringVar(&o.kvepp, "kvepp", "bin/kvepp", "kvepp's program")
	flag.StringVar(&o.envoy, "envoy", "", "Envoy's program")
	flag.StringVar(&o.model, "model", "", "folder of a real model's tokenizer")
	flag.StringVar(&o.out, "out", "", "folder for charts of the tables, in SVG; empty: none")
	flag.IntVar(&o.rounds, "rounds", 5, "number of measurements of each kind")
	flag.DurationVar(&o.length, "length", time.Second, "time of one measurement")
	flag.IntVar(&o.streams, "streams", 500, "number of concurrent streams")
	flag.IntVar(&o.chunks, "chunks", 100, "pieces of each stream, ten a second")
	flag.StringVar(&o.only, "only", "", "run only this part: bodies, chats, streams; or page or shadow, which "+
		"run only if they are named")
	flag.IntVar(&o.size, "size", 0, "only bodies of this many KB: 4, 32, 256 or 1024")
	flag.IntVar(&o.connections, "connections", 0, "only bodies over this many connections: 1 or 64")
	flag.StringVar(
		&o.gaie,
		"gaie",
		"",
		"folder with the Gateway API's endpoint picker (epp) and its CustomResourceDefinitions (crds); empty: it is "+
			"not measured",
	)
	flag.StringVar(&o.kube, "kube", "", "folder with kube-apiserver and etcd, for -gaie")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	fail(run(ctx, &o))
}

func fail(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "test/bench/path:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

func run(ctx context.Context, o *options) error {
	p, err := start(ctx, o)
	if err != nil {
		return err
	}
	defer p.close()
	for _, part := range []struct {
		name string
		run  func(context.Context, *options, *programs) error
	}{{"bodies", bodies}, {"chats", chats}, {"streams", streams}, {"page", page}, {"shadow", shadow}} {
		if o.only != part.name && (o.only != "" || part.name == "page" || part.name == "shadow") {
			continue
		}
		if err := part.run(ctx, o, p); err != nil {
			return fmt.Errorf("%s: %w", part.name, err)
		}
	}
	return nil
}
