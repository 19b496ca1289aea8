package extproc

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	filterv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/protobuf/types/known/structpb"

	"kvepp/prompt/body"
	"kvepp/router"
)

var rewrite = flag.Bool("rewrite", false, "rewrite the output in the transcripts of testdata")

// TestTranscripts plays each transcript of testdata against the state machine. A transcript is a list of steps. A step
// is a line with the input, "----", and the output up to an empty line. `go test ./extproc -rewrite` rewrites the
// output; read the difference before you commit it.
func TestTranscripts(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatalf("no transcripts: %v", err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			want, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			var got bytes.Buffer
			s := &stream{cfg: &Config{MaxParseBytes: 1 << 20}, takesLists: true}
			skipping := false
			for line := range strings.Lines(string(want)) {
				line = strings.TrimSuffix(line, "\n")
				switch {
				case line == "----":
					skipping = true
				case line == "":
					skipping = false
					got.WriteString("\n")
				case skipping:
				case strings.HasPrefix(line, "#"):
					fmt.Fprintln(&got, line)
				default:
					e, err := play(s, line)
					if err != nil {
						t.Fatalf("%q: %v", line, err)
					}
					fmt.Fprintf(&got, "%s\n----\n%s", line, describe(s, e))
				}
			}
			if *rewrite {
				if err := os.WriteFile(file, got.Bytes(), 0o644); err != nil {
					t.Fatal(err)
				}
				return
			}
			if got.String() != string(want) {
				t.Errorf(
					"transcript differs (go test ./extproc -rewrite writes it):\n%s",
					diff(string(want), got.String()),
				)
			}
		})
	}
}

// play takes one step of a transcript.
func play(s *stream, line string) (effect, error) {
	fields := strings.Fields(line)
	args := map[string]string{}
	var words []string
	for _, f := range fields[1:] {
		if k, v, ok := strings.Cut(f, "="); ok {
			args[k] = v
		} else {
			words = append(words, f)
		}
	}
	end := slices.Contains(words, "eos")
	headers := func() *extprocv3.HttpHeaders {
		h := &extprocv3.HttpHeaders{Headers: &corev3.HeaderMap{}, EndOfStream: end}
		for _, f := range fields[1:] {
			if k, v, ok := strings.Cut(f, "="); ok &&
				!slices.Contains([]string{"request-mode", "response-mode", "subset", "served"}, k) {
				header := &corev3.HeaderValue{Key: k, RawValue: []byte(v)}
				if slices.Contains(words, "as-value") {
					header = &corev3.HeaderValue{Key: k, Value: v}
				}
				h.Headers.Headers = append(h.Headers.Headers, header)
			}
		}
		return h
	}
	payload := func() *extprocv3.HttpBody {
		b := &extprocv3.HttpBody{EndOfStream: end, Body: []byte(args["text"])}
		if n, err := strconv.Atoi(args["size"]); err == nil {
			b.Body = bytes.Repeat([]byte("x"), n)
		}
		return b
	}
	in := &extprocv3.ProcessingRequest{ObservabilityMode: slices.Contains(words, "observed")}
	switch fields[0] {
	case "config":
		s.cfg.PrefillerHeader = args["prefiller"] == "true"
		s.cfg.DecisionHeaders = args["decision-headers"] == "true"
		s.cfg.Conformance = args["conformance"] == "true"
		s.cfg.IgnoreHints = args["ignore-hints"] == "true"
		s.cfg.Frontends = args["frontends"] == "true"
		s.takesLists = args["lists"] != "false"
		if n, err := strconv.Atoi(args["max-parse-bytes"]); err == nil {
			s.cfg.MaxParseBytes = n
		}
		s.cfg.MaxBodyBytes, _ = strconv.Atoi(args["max-body-bytes"])
		return effect{}, nil
	case "request-headers":
		in.Request = &extprocv3.ProcessingRequest_RequestHeaders{RequestHeaders: headers()}
		if args["request-mode"] != "absent" {
			mode := func(name string) filterv3.ProcessingMode_BodySendMode {
				if v, ok := filterv3.ProcessingMode_BodySendMode_value[name]; ok {
					return filterv3.ProcessingMode_BodySendMode(v)
				}
				if v, err := strconv.Atoi(name); err == nil {
					return filterv3.ProcessingMode_BodySendMode(v)
				}
				return filterv3.ProcessingMode_FULL_DUPLEX_STREAMED
			}
			in.ProtocolConfig = &extprocv3.ProtocolConfiguration{
				RequestBodyMode: mode(args["request-mode"]), ResponseBodyMode: mode(args["response-mode"])}
		}
		if v, ok := args["protocol"]; ok {
			in.Attributes = map[string]*structpb.Struct{
				attributesNamespace: {
					Fields: map[string]*structpb.Value{protocolAttribute: structpb.NewStringValue(v)},
				},
			}
		}
		if v, ok := args["subset"]; ok {
			hint := structpb.NewStringValue(v)
			if strings.HasPrefix(v, "[\"") || v == "[]" {
				hint = new(structpb.Value)
				if err := hint.UnmarshalJSON([]byte(v)); err != nil {
					return effect{}, err
				}
			}
			in.MetadataContext = &corev3.Metadata{FilterMetadata: map[string]*structpb.Struct{subsetNamespace: {
				Fields: map[string]*structpb.Value{subsetKey: hint}}}}
		}
		if slices.Contains(words, "large") {
			h := in.GetRequestHeaders().Headers
			h.Headers = append(h.Headers, &corev3.HeaderValue{Key: "x", RawValue: make([]byte, maxHeaderBytes)})
		}
	case "request-body":
		in.Request = &extprocv3.ProcessingRequest_RequestBody{RequestBody: payload()}
	case "request-trailers":
		in.Request = &extprocv3.ProcessingRequest_RequestTrailers{RequestTrailers: &extprocv3.HttpTrailers{}}
	case "response-headers":
		in.Request = &extprocv3.ProcessingRequest_ResponseHeaders{ResponseHeaders: headers()}
	case "response-body":
		in.Request = &extprocv3.ProcessingRequest_ResponseBody{ResponseBody: payload()}
	case "response-trailers":
		in.Request = &extprocv3.ProcessingRequest_ResponseTrailers{ResponseTrailers: &extprocv3.HttpTrailers{}}
	case "no-request":
	case "renamed":
		s.renamed = &router.Renamed{Requested: args["asked"], Upstream: args["served-as"]}
		return effect{}, nil
	case "instead":
		s.replacement = []byte(args["text"])
		return effect{}, nil
	case "routed":
		id, _ := strconv.ParseUint(args["id"], 10, 64)
		rank, _ := strconv.ParseUint(args["rank"], 10, 32)
		d := &router.Decision{Name: args["name"], Address: args["address"], InstanceID: id, Rank: uint32(rank),
			Reason: router.ReasonKV, PromptTokens: 100, PredictedCachedTokens: 64,
			Costs: []router.Cost{{Name: args["name"], Rank: uint32(rank), Cost: 12.25}, {Name: "other", Cost: 18}}}
		if v, ok := args["waited"]; ok {
			d.Waited, _ = time.ParseDuration(v)
		}
		if v := args["fallbacks"]; v != "" {
			d.Fallbacks = strings.Split(v, ",")
		}
		if id, err := strconv.ParseUint(args["prefill-id"], 10, 64); err == nil {
			d.Prefill = &router.Prefill{
				Name:       args["prefill"],
				Address:    args["prefill-address"],
				InstanceID: id,
				Rank:       3,
				Costs:      []router.Cost{{Name: args["prefill"], Rank: 3, Cost: 6.5}},
			}
		}
		return s.routed(d), nil
	case "refused":
		e, ok := map[string]error{"no-endpoints": router.ErrNoEndpoints, "unknown-model": router.ErrUnknownModel,
			"no-prefill": router.ErrNoPrefill, "constraints": router.ErrConstraints,
			"bad-body": &body.Error{Code: "invalid_type", Param: "model", Message: "'model' must be a string."},
			"defect":   fmt.Errorf("something else")}[words[0]]
		if !ok {
			return effect{}, fmt.Errorf("no such error")
		}
		return s.refused(new(Config).toHTTP(e)), nil
	default:
		return effect{}, fmt.Errorf("no such step")
	}
	if v, ok := args["served"]; ok {
		in.MetadataContext = &corev3.Metadata{FilterMetadata: map[string]*structpb.Struct{endpointNamespace: {
			Fields: map[string]*structpb.Value{servedByKey: structpb.NewStringValue(v)}}}}
	}
	return s.step(in), nil
}

// describe renders an effect as text.
func describe(s *stream, e effect) string {
	var b strings.Builder
	if e.Note != "" {
		fmt.Fprintf(&b, "note: %s\n", e.Note)
	}
	if e.Unjudged != "" {
		fmt.Fprintf(&b, "unjudged: %s\n", e.Unjudged)
	}
	if e.Ask {
		r := s.request()
		fmt.Fprintf(&b, "ask: path=%s id=%s", r.Path, r.ID)
		if r.BodylessReason != "" {
			fmt.Fprintf(&b, " without=%s body-bytes=%d", r.BodylessReason, r.BodyBytes)
		} else {
			fmt.Fprintf(&b, " body=%s", shown(r.Body))
		}
		b.WriteString(hints(r.Hints))
		if r.Allowed != nil {
			for _, address := range []string{"10.0.0.1:8000", "10.0.0.1:8001", "10.0.0.2:8000", "[fd00::7]:8000",
				"[fd00::7]:8001", "worker.example:8000"} {
				if r.Allowed(address) {
					fmt.Fprintf(&b, " allows=%s", address)
				}
			}
		}
		b.WriteString("\n")
	}
	if e.Refuse != nil {
		b.WriteString("refuse\n")
		e.Send, e.Close = s.refused(e.Refuse).Send, true
	}
	for _, m := range e.Send {
		b.WriteString("send ")
		switch r := m.Response.(type) {
		case *extprocv3.ProcessingResponse_RequestHeaders:
			fmt.Fprintf(&b, "request_headers clear_route_cache=%v", r.RequestHeaders.GetResponse().GetClearRouteCache())
			mutation(&b, r.RequestHeaders.GetResponse().GetHeaderMutation())
		case *extprocv3.ProcessingResponse_ResponseHeaders:
			b.WriteString("response_headers")
			mutation(&b, r.ResponseHeaders.GetResponse().GetHeaderMutation())
		case *extprocv3.ProcessingResponse_RequestBody:
			piece(&b, "request_body", r.RequestBody)
		case *extprocv3.ProcessingResponse_ResponseBody:
			piece(&b, "response_body", r.ResponseBody)
		case *extprocv3.ProcessingResponse_RequestTrailers:
			b.WriteString("request_trailers")
		case *extprocv3.ProcessingResponse_ResponseTrailers:
			b.WriteString("response_trailers")
		case *extprocv3.ProcessingResponse_ImmediateResponse:
			i := r.ImmediateResponse
			fmt.Fprintf(&b, "immediate_response status=%d details=%s", i.GetStatus().GetCode(), i.GetDetails())
			if i.GrpcStatus != nil {
				fmt.Fprintf(&b, " grpc-status=%d", i.GetGrpcStatus().GetStatus())
			}
			mutation(&b, i.GetHeaders())
			fmt.Fprintf(&b, "\n  body: %s", i.GetBody())
		}
		if m.DynamicMetadata != nil {
			for ns, v := range m.DynamicMetadata.AsMap() {
				fmt.Fprintf(&b, "\n  metadata %s %v", ns, v)
			}
		}
		b.WriteString("\n")
	}
	if e.ServedBy != "" {
		fmt.Fprintf(&b, "served by %s\n", e.ServedBy)
	}
	if e.Status != "" {
		fmt.Fprintf(&b, "status=%s content-type=%q content-encoding=%q\n", e.Status, e.ContentType, e.ContentEncoding)
	}
	if len(e.Body) > 0 {
		fmt.Fprintf(&b, "look at %s\n", shown(e.Body))
	}
	if e.Close {
		b.WriteString("close\n")
	}
	return b.String()
}

// hints renders the hints that are set.
func hints(h body.Hints) string {
	var b strings.Builder
	for _, x := range []struct{ name, value string }{{"policy-class", h.PolicyClass}, {"tenant", h.Tenant},
		{"session", h.Session},
		{"parent", h.ParentSession}, {"malformed", strings.Join(h.Malformed, ",")}} {
		if x.value != "" {
			fmt.Fprintf(&b, " %s=%s", x.name, x.value)
		}
	}
	if h.Priority != nil {
		fmt.Fprintf(&b, " priority=%d", *h.Priority)
	}
	if h.StrictPriority != 0 {
		fmt.Fprintf(&b, " strict-priority=%d", h.StrictPriority)
	}
	if h.SessionFinal {
		b.WriteString(" final")
	}
	return b.String()
}

func mutation(b *strings.Builder, m *extprocv3.HeaderMutation) {
	for _, h := range m.GetSetHeaders() {
		fmt.Fprintf(b, "\n  set %s: %s", h.GetHeader().GetKey(), h.GetHeader().GetRawValue())
	}
	if len(m.GetRemoveHeaders()) > 0 {
		fmt.Fprintf(b, "\n  remove %s", strings.Join(m.GetRemoveHeaders(), " "))
	}
}

func piece(b *strings.Builder, name string, r *extprocv3.BodyResponse) {
	streamed := r.GetResponse().GetBodyMutation().GetStreamedResponse()
	if streamed == nil {
		if whole := r.GetResponse().GetBodyMutation(); whole != nil {
			fmt.Fprintf(b, "%s becomes %s", name, shown(whole.GetBody()))
		} else {
			fmt.Fprintf(b, "%s unchanged", name)
		}
		if r.GetResponse() != nil {
			fmt.Fprintf(b, " clear_route_cache=%v", r.GetResponse().GetClearRouteCache())
			mutation(b, r.GetResponse().GetHeaderMutation())
		}
		return
	}
	fmt.Fprintf(b, "%s %s", name, shown(streamed.GetBody()))
	if streamed.GetEndOfStream() {
		b.WriteString(" eos")
	}
}

func shown(body []byte) string {
	if len(body) > 60 {
		return fmt.Sprintf("%d bytes", len(body))
	}
	return strconv.Quote(string(body))
}

// diff returns the first line that differs, and the lines around it.
func diff(want, got string) string {
	w, g := strings.Split(want, "\n"), strings.Split(got, "\n")
	for i := range max(len(w), len(g)) {
		a, b := "(end)", "(end)"
		if i < len(w) {
			a = w[i]
		}
		if i < len(g) {
			b = g[i]
		}
		if a != b {
			return fmt.Sprintf("line %d\nwant %s\ngot  %s", i+1, a, b)
		}
	}
	return "no line differs"
}

// TestTenantHeader: the header that the operator chose says who sent the request.
func TestTenantHeader(t *testing.T) {
	headers := &corev3.HeaderMap{Headers: []*corev3.HeaderValue{
		{Key: "Authorization", RawValue: []byte("Bearer k\xff")},
		{Key: "x-llm-d-inference-fairness-id", RawValue: []byte("other")}}}
	for header, want := range map[string]string{"": "", "x-api-key": "", "authorization": "Bearer k\xff"} {
		if h := readHead(headers, &Config{TenantHeader: header}); h.hints.Sender != want ||
			h.hints.Fairness != "other" {
			t.Errorf("%q: sent by %q, fairness %q", header, h.hints.Sender, h.hints.Fairness)
		}
	}
}
