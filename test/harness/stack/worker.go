package stack

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"kvepp/test/harness/process"
)

// BlockSize is the workers' KV block size in tokens.
const BlockSize = 16

// Worker is one mocker with its frontend, unless the frontend is shared.
type Worker struct {
	Name      string
	Namespace string // Dynamo's
	Address   string // of its frontend
	Zone      string // of the cluster; empty: none is known

	stack          *Stack
	speed          float64 // of the mocked engine
	component      string  // Dynamo's
	instance       uint64  // its id, with a shared frontend
	bootstrap      int     // port of a prefill worker where decode workers fetch blocks
	events, replay int
	page           int    // port of its own metrics; 0: none
	host           string // of its frontend
	port           int
	mocker         *process.Process
	frontend       *process.Process
}

func (w *Worker) startMocker() (err error) {
	s := w.stack
	args := []string{s.python(), "-m", "dynamo.mocker",
		"--model-path", s.cfg.Model, "--model-name", Model, "--endpoint", "dyn://" + w.Namespace + "." + w.component +
			".generate",
		"--block-size", strconv.Itoa(BlockSize), "--num-gpu-blocks-override", strconv.Itoa(s.cfg.Blocks),
		"--speedup-ratio", strconv.FormatFloat(w.speed, 'f', -1, 64), "--data-parallel-size",
		strconv.Itoa(s.cfg.Ranks)}
	if s.cfg.EventPlane == "" {
		args = append(
			args,
			"--zmq-kv-events-ports",
			strconv.Itoa(w.events),
			"--zmq-replay-ports",
			strconv.Itoa(w.replay),
		)
	}
	if s.cfg.DecodeSpeedup != 0 {
		args = append(args, "--decode-speedup-ratio", strconv.FormatFloat(s.cfg.DecodeSpeedup, 'f', -1, 64))
	}
	switch {
	case w.bootstrap != 0:
		args = append(args, "--disaggregation-mode", "prefill", "--bootstrap-ports", strconv.Itoa(w.bootstrap))
	case s.cfg.Prefill > 0:
		args = append(args, "--disaggregation-mode", "decode")
	}
	env := s.dynamoEnv()
	if w.page != 0 {
		env = append(env, fmt.Sprintf("DYN_SYSTEM_PORT=%d", w.page))
	}
	if w.Zone != "" {
		dir := filepath.Join(s.dir, w.Name+"-topology")
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(dir, "zone"), []byte(w.Zone), 0o644); err != nil {
			return err
		}
		env = append(env, "DYN_TOPOLOGY_ENABLED=1", "DYN_TOPOLOGY_MOUNT_PATH="+dir, "DYN_KV_TRANSFER_DOMAIN=zone")
	}
	w.mocker, err = s.spawn(w.Name+"-mocker", env, args...)
	return err
}

func (w *Worker) startFrontend() (err error) {
	s := w.stack
	args := []string{s.python(), "-m", "dynamo.frontend", "--router-mode", cmp.Or(s.cfg.FrontendMode, "direct"),
		"--http-host", w.host, "--http-port", strconv.Itoa(w.port)}
	args = append(args, s.cfg.FrontendArgs...)
	if s.cfg.SharedFrontend {
		if s.shared == nil {
			s.shared, err = s.spawn("frontend", s.dynamoEnv(), args...)
		}
		w.frontend = s.shared
		return err
	}
	w.frontend, err = s.spawn(w.Name+"-frontend", s.dynamoEnv(), append(args, "--namespace", w.Namespace)...)
	return err
}

// newInstance waits for an instance in discovery that belongs to no other worker.
func (w *Worker) newInstance(ctx context.Context) (id uint64, err error) {
	return id, w.stack.up(ctx, w.Name, func() error {
		files, err := os.ReadDir(filepath.Join(w.stack.discovery(), "v1/instances"))
		if err != nil {
			return err
		}
		for _, f := range files {
			name, err := url.PathUnescape(f.Name())
			if err != nil {
				return err
			}
			hex, ok := strings.CutPrefix(name, w.Namespace+"/"+w.component+"/generate/")
			if !ok {
				continue
			}
			if id, err = strconv.ParseUint(hex, 16, 64); err != nil {
				return err
			}
			if !slices.ContainsFunc(w.stack.Workers, func(o *Worker) bool { return o.instance == id }) {
				return nil
			}
		}
		return errors.New("the worker is not in discovery yet")
	}, w.mocker)
}

// Ready waits until the worker's frontend serves the model. If the frontend routes by headers, it also waits until a
// request reaches the worker's own instance.
func (w *Worker) Ready(ctx context.Context) error {
	return w.stack.up(ctx, w.Name, func() error {
		id, err := w.InstanceID(ctx)
		if err != nil {
			return err
		}
		var models struct{ Data []struct{ ID string } }
		if err := getJSON(ctx, "http://"+w.Address+"/v1/models", &models); err != nil {
			return err
		}
		if len(models.Data) == 0 {
			return errors.New("the worker's frontend serves no model yet")
		}
		if w.stack.cfg.Frontend != "" {
			return nil
		}
		return w.responds(ctx, id)
	}, w.frontend, w.mocker)
}

// responds requests one token for a prompt of less than a block from the worker with this instance. A frontend that
// knows a model and its instances may still answer 404 or 503 for a moment.
func (w *Worker) responds(ctx context.Context, instance string) error {
	header := http.Header{"X-Dynamo-Worker-Instance-Id": {instance}, "X-Dynamo-Dp-Rank": {"0"}}
	for _, other := range w.stack.Workers {
		if w.stack.cfg.Prefill == 0 || other.component == w.component || other.Zone != w.Zone {
			continue
		}
		prefill := other.Instance()
		if w.component == "prefill" {
			header.Set("X-Dynamo-Worker-Instance-Id", prefill)
			prefill = instance
		}
		header.Set("X-Dynamo-Prefill-Instance-Id", prefill)
		header.Set("X-Dynamo-Prefill-Dp-Rank", "0")
		break
	}
	a, err := Post(ctx, http.DefaultClient, "http://"+w.Address+"/v1/completions", header,
		map[string]any{"model": Model, "prompt": []int{5, 6, 7}, "max_tokens": 1})
	if err == nil && a.Status != http.StatusOK {
		err = fmt.Errorf("its frontend answers %d: %.200s", a.Status, a.Body)
	}
	return err
}

// Kill kills the mocker. Its frontend stays.
func (w *Worker) Kill() { w.mocker.Kill() }

// Signal sends a signal to the mocker.
func (w *Worker) Signal(sig syscall.Signal) { w.mocker.Signal(sig) }

// Stop ends the mocker with SIGTERM, so that it leaves discovery first.
func (w *Worker) Stop() { w.mocker.Stop() }

// Restart starts the mocker again on the same ports. It gets a new instance id.
func (w *Worker) Restart() error { return w.startMocker() }

// Instance returns the id of a worker behind a shared frontend.
func (w *Worker) Instance() string { return strconv.FormatUint(w.instance, 10) }

// Entry returns the worker's entry for the endpoints file.
func (w *Worker) Entry() string {
	entry := fmt.Sprintf("- name: %s\n  address: %s\n", w.Name, w.Address)
	if w.stack.cfg.EventPlane == "" {
		entry += fmt.Sprintf("  kvEvents: tcp://127.0.0.1:%d\n  kvReplay: tcp://127.0.0.1:%d\n", w.events, w.replay)
	}
	if w.page != 0 {
		entry += fmt.Sprintf("  metrics: http://127.0.0.1:%d/metrics\n", w.page)
	}
	if !w.stack.cfg.SharedFrontend {
		return entry + fmt.Sprintf("  dynamo: %s/backend/generate\n", w.Namespace)
	}
	entry += fmt.Sprintf("  instanceId: %d\n  dataParallelSize: %d\n", w.instance, w.stack.cfg.Ranks)
	if w == w.stack.Workers[0] {
		entry += fmt.Sprintf("  blockSize: %d\n", BlockSize)
	}
	return entry
}

// EventsURL returns where the worker publishes its KV events.
func (w *Worker) EventsURL() string { return fmt.Sprintf("tcp://127.0.0.1:%d", w.events) }

// PageURL returns where the worker's own metrics are; it needs Config.Pages or Config.Picker.
func (w *Worker) PageURL() string { return fmt.Sprintf("http://127.0.0.1:%d/metrics", w.page) }

// InstanceID returns the worker's current id in Dynamo.
func (w *Worker) InstanceID(ctx context.Context) (string, error) {
	var health struct {
		Instances []struct {
			Namespace, Endpoint string
			InstanceID          json.Number `json:"instance_id"`
		}
	}
	if err := getJSON(ctx, "http://"+w.Address+"/health", &health); err != nil {
		return "", err
	}
	for _, in := range health.Instances {
		if id := in.InstanceID.String(); in.Namespace == w.Namespace && in.Endpoint == "generate" &&
			(w.instance == 0 || id == w.Instance()) {
			return id, nil
		}
	}
	return "", fmt.Errorf("stack: %s has no instance", w.Name)
}
