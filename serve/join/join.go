package join

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"

	"kvepp/internal/boundedfile"
	"kvepp/internal/metrics"
	"kvepp/pool"
	"kvepp/pool/dynamo"
	"kvepp/pool/enginemetrics"
	"kvepp/pool/engineversion"
	"kvepp/pool/kube"
	"kvepp/prompt"
	"kvepp/serve/models"
)

// Join joins the endpoints file, Dynamo's discovery and the cluster into the endpoints of a pool. Set the exported
// fields, then call Follow once.
type Join struct {
	*Config
	Models  *models.Config
	Loaded  models.Models
	Files   map[string]dynamo.ModelFiles // of the models, by model
	Gauges  *enginemetrics.Config        // how engines are reached; Interval is 0: they are never asked
	Cluster *kube.Cluster                // nil: there is none
	Pool    *pool.Pool
	Metrics *metrics.Metrics
	Log     *slog.Logger

	names *pool.Names

	mu sync.Mutex // guards the fields below; held during pool.Update, so that the latest state wins

	entries    []pool.Entry      // of the endpoints file
	discovered []dynamo.Instance // by --dynamo-discovery
	pods       kube.State        // of the cluster

	finder     *engineversion.Finder    // nil: the engines are not asked for their versions
	mismatches map[dynamo.Mismatch]bool // that are logged
	problems   *problems
}

// Finder returns what asks engines for their versions; nil if they are never asked.
func (j *Join) Finder(changed func()) *engineversion.Finder {
	if j.Gauges.Interval == 0 {
		return nil
	}
	return j.Models.Finder(j.Gauges.ClientTLS(), changed)
}

// Follow updates the pool from the endpoints file and Dynamo's discovery until ctx ends, and from the cluster until
// stop is called: while the last requests drain, workers still leave.
func (j *Join) Follow(ctx context.Context) (stop func(), err error) {
	if j.names, err = pool.NewNames(j.DNSFamily, j.Log); err != nil {
		return nil, fmt.Errorf("--dns-lookup-family: %w", err)
	}
	j.mismatches, j.problems = map[dynamo.Mismatch]bool{}, newProblems(j.Log)
	if j.finder = j.Finder(func() { j.change(func() {}) }); j.finder != nil {
		go j.finder.Run(ctx)
	}
	metrics.Gauge(j.Metrics, metrics.UnresolvedNames, j.names.Unresolved)
	setDiscovered := func(now []dynamo.Instance) { j.change(func() { j.discovered = now }) }
	switch kind, at, _ := strings.Cut(j.Discovery, ":"); kind {
	case "file":
		dynamo.NewFileStore(at, j.Log).Watch(ctx, setDiscovered)
	case "frontend":
		dynamo.NewFrontends(strings.Split(at, ","), j.Log).Watch(ctx, setDiscovered)
	}
	stop = func() {}
	if j.Cluster != nil {
		stop = j.Cluster.Follow(func(now kube.State) { j.change(func() { j.pods = now }) })
	}
	if j.File == "" {
		return stop, nil
	}
	parse := j.Parse
	if parse == nil {
		parse = pool.ParseFile
	}
	use := func(text []byte) error {
		now, err := parse(text)
		if err != nil {
			return err
		}
		hasPath := func(e pool.Entry) bool { return e.Dynamo != "" }
		if i := slices.IndexFunc(now, hasPath); i >= 0 && j.Discovery == "" {
			return fmt.Errorf("endpoint %q has a dynamo path, but --dynamo-discovery is not given", now[i].Name)
		}
		if err := checkVersions(j.Models.Engine(), now); err != nil {
			return err
		}
		j.names.Use(ctx, now)
		j.change(func() { j.entries = now })
		return nil
	}
	file := boundedfile.Watched{Path: j.File, Most: pool.MaxFile, What: "endpoints file", Log: j.Log, Use: use,
		Refused: j.Metrics.EndpointFileRefused.Inc}
	if err := file.Watch(ctx); err != nil {
		stop()
		return stop, err
	}
	go j.names.Follow(ctx, func() { j.change(func() {}) })
	return stop, nil
}

// change applies a change of a source, joins the sources and updates the pool.
func (j *Join) change(apply func()) {
	j.mu.Lock()
	defer j.mu.Unlock()
	apply()
	instances := slices.Concat(j.discovered, j.pods.Instances)
	j.problems.begin()
	j.applySettings(instances)
	endpoints := j.addCluster(dynamo.Join(j.names.Resolve(j.entries), j.discovered))
	found := len(endpoints)
	endpoints = j.problems.usable(endpoints)
	j.Metrics.RefusedEndpoints.Set(float64(found - len(endpoints)))
	mismatches := dynamo.Compare(endpoints, instances, j.Files)
	j.Metrics.ModelFileMismatches.Set(float64(len(mismatches)))
	j.logMismatches(mismatches)
	j.setVersions(endpoints)
	j.problems.warnMixedFrontends(endpoints)
	encoders := 0
	for i := range endpoints {
		if j.BlockSize > 0 {
			endpoints[i].BlockSize = j.BlockSize
		}
		if endpoints[i].Role == pool.Encode {
			encoders++
		}
	}
	j.Metrics.IgnoredEndpoints.Set(float64(encoders))
	if encoders > 0 {
		j.problems.warn("kvepp ignores the endpoints whose model card says that they are encode workers")
	}
	j.Pool.Update(endpoints)
}

// usable returns the endpoints whose names, addresses and texts are valid. It reuses the slice.
func (p *problems) usable(endpoints []pool.Endpoint) []pool.Endpoint {
	return slices.DeleteFunc(endpoints, func(e pool.Endpoint) bool {
		err := e.Check()
		if err != nil {
			p.warn("kvepp ignores an endpoint because its name, address or a text is invalid: %v", err)
		}
		return err != nil
	})
}

// addCluster returns the endpoints of the file and those of the cluster. If a name is in both, the file takes
// precedence.
func (j *Join) addCluster(file []pool.Endpoint) []pool.Endpoint {
	names := make(map[string]bool, len(file))
	for i := range file {
		names[file[i].Name] = true
	}
	for _, e := range j.pods.Endpoints {
		if names[e.Name] {
			j.problems.warn("endpoint %q is in the endpoints file and in the cluster: kvepp uses the file's", e.Name)
			continue
		}
		file = append(file, e)
	}
	return file
}

// warnMixedFrontends warns about Dynamo's frontends that serve one model in two ways: by workers of two namespaces, or
// by aggregated and by decode workers. Such a frontend chooses one of the ways at random for each request, and refuses
// requests that name a worker of the other.
//
// Source: dynamo-llm 1.6.1, discovery (a model's worker sets), and the responses of its frontend.
func (p *problems) warnMixedFrontends(endpoints []pool.Endpoint) {
	type frontend struct{ address, model string }
	type way struct {
		namespace  string
		aggregated bool
	}
	seen := map[frontend]way{}
	for i := range endpoints {
		e := &endpoints[i]
		if e.Namespace == "" || e.Role != pool.Aggregated && e.Role != pool.Decode {
			continue
		}
		at, how := frontend{e.Address, e.Model}, way{e.Namespace, e.Role == pool.Aggregated}
		if first, known := seen[at]; !known {
			seen[at] = how
		} else if first != how {
			p.warn("the frontend at %s serves %q in two ways (workers of two Dynamo namespaces, or aggregated and "+
				"decode workers) and will refuse requests at random: give each its own frontend, started with "+
				"--namespace", e.Address, e.Model)
		}
	}
}

// logMismatches logs the files of workers that differ from kvepp's, and were not logged by the last call.
func (j *Join) logMismatches(mismatches []dynamo.Mismatch) {
	now := map[dynamo.Mismatch]bool{}
	for _, d := range mismatches {
		if !j.mismatches[d] {
			j.Log.Error("a worker's model file differs from kvepp's: kvepp routes to the worker by load only. Give "+
				"kvepp the folder that the worker serves (--model), and its template (--chat-template)",
				"worker", d.Endpoint, "file", d.File, "own", d.Own, "worker's", d.Worker)
		}
		now[d] = true
	}
	j.mismatches = now
}

// applySettings gives the settings of Dynamo's workers that change prompts to the tokenizers of their models.
func (j *Join) applySettings(instances []dynamo.Instance) {
	workers := map[string][]prompt.DynamoSettings{}
	for _, in := range instances {
		// instances that a frontend lists have no card
		if in.Card == nil || len(in.Card.RuntimeConfig) == 0 || j.Loaded[in.Card.Model] == nil {
			continue
		}
		settings, err := prompt.ParseDynamoSettings(in.Card.RuntimeConfig)
		if err != nil {
			j.problems.warn("kvepp cannot read the model card of a worker of %q, so it may predict its prompts "+
				"wrongly: %v", in.Card.Model, err)
			continue
		}
		if all := workers[in.Card.Model]; len(all) > 0 && all[0] != settings {
			j.problems.warn("the model cards of the workers of %q differ in settings that change prompts: kvepp "+
				"routes its chats by load. Give all workers of a model the same --dyn-reasoning-parser, "+
				"--dyn-tool-call-parser and so on", in.Card.Model)
		}
		workers[in.Card.Model] = append(workers[in.Card.Model], settings)
	}
	for name, model := range j.Loaded {
		if model != nil {
			model.SetDynamo(workers[name])
		}
	}
}
