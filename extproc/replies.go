package extproc

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/protobuf/types/known/structpb"

	"kvepp/internal/tracing"
	"kvepp/prompt/body"
	"kvepp/router"
)

// The wire names of the endpoint-picker protocol (Gateway API Inference Extension, proposal 004).
const (
	endpointHeader    = "x-gateway-destination-endpoint"
	subsetKey         = "x-gateway-destination-endpoint-subset"
	servedByKey       = "x-gateway-destination-endpoint-served"
	endpointNamespace = "envoy.lb"
	subsetNamespace   = "envoy.lb.subset_hint"
)

// The attributes that Envoy sends where the filter's request_attributes name them. "HTTP/1.1", "HTTP/2".
const (
	attributesNamespace = "envoy.filters.http.ext_proc"
	protocolAttribute   = "request.protocol"
)

// tokenKey is the metadata key of the token by which kvepp finds a request in the proxy's access log (see
// accesslog.go).
const tokenKey = "x-kvepp-token"

// The headers that Dynamo's frontend reads in direct mode. Source: dynamo-llm 1.6.1, protocols::common::extensions.
const (
	workerHeader      = "x-dynamo-worker-instance-id"
	rankHeader        = "x-dynamo-dp-rank"
	prefillHeader     = "x-dynamo-prefill-instance-id"
	prefillRankHeader = "x-dynamo-prefill-dp-rank"
)

// dynamoIDHeader is Dynamo's id of the request, if it is a UUID. Workers note the first token under it.
const dynamoIDHeader = "x-dynamo-request-id"

// prefillerHeader tells llm-d's routing sidecar, which runs before a stock decode engine, the prefill worker's address.
const prefillerHeader = "x-prefiller-host-port"

// The names that older frontends and engines read.
var (
	workerAliases      = []string{"x-worker-instance-id"}
	rankAliases        = []string{"x-dp-rank", "x-data-parallel-rank"}
	prefillAliases     = []string{"x-prefill-instance-id"}
	prefillRankAliases = []string{"x-prefill-dp-rank"}
)

// protectedHeaders are the routing headers that a client must never choose. kvepp removes from every request those that
// it does not set itself.
var protectedHeaders = []string{
	endpointHeader, subsetKey, servedByKey,
	workerHeader, rankHeader, prefillHeader, prefillRankHeader, "x-dynamo-routing-mode",
	"x-worker-instance-id", "x-dp-rank", "x-data-parallel-rank", "x-prefill-instance-id", "x-prefill-dp-rank",
	prefillerHeader,
	// llm-d's sidecar routes by these.
	"x-encoder-hosts-ports", "x-data-parallel-host-port", "x-kv-cache-source-host-port",
	"x-smg-target-worker", // SGLang's gateway sends to the worker that it names
}

// overridePrefix begins the headers by which SGLang replaces fields of a request: its rank, the prefill worker that it
// fetches blocks from, its priority. Source: SGLang 0.5.23, entrypoints/request_headers.
const overridePrefix = "x-override-"

type direction int

const (
	requestDirection direction = iota
	responseDirection
)

// body wraps a response to a piece of a body.
func (d direction) body(reply *extprocv3.BodyResponse) *extprocv3.ProcessingResponse {
	if d == requestDirection {
		return &extprocv3.ProcessingResponse{Response: &extprocv3.ProcessingResponse_RequestBody{RequestBody: reply}}
	}
	return &extprocv3.ProcessingResponse{Response: &extprocv3.ProcessingResponse_ResponseBody{ResponseBody: reply}}
}

// streamed wraps a streamed piece of a body. There are many of them, so all of its parts are one allocation.
func (d direction) streamed(piece *extprocv3.StreamedBodyResponse) *extprocv3.ProcessingResponse {
	m := &struct {
		reply    extprocv3.BodyResponse
		common   extprocv3.CommonResponse
		mutation extprocv3.BodyMutation
		streamed extprocv3.BodyMutation_StreamedResponse
	}{}
	m.reply.Response, m.common.BodyMutation, m.mutation.Mutation, m.streamed.StreamedResponse = &m.common, &m.mutation,
		&m.streamed, piece
	return d.body(&m.reply)
}

// appendBody appends the messages that relay one piece of a body, in pieces of at most maxChunk bytes. The bytes are
// not copied. An empty piece is one message: it may carry the end of the stream.
func appendBody(
	out []*extprocv3.ProcessingResponse, d direction, body []byte, end bool,
) []*extprocv3.ProcessingResponse {
	for {
		piece := body[:min(len(body), maxChunk)]
		body = body[len(piece):]
		// "The server sets this flag to true if it has received a body request with end_of_stream set to true, and this
		// is the last chunk of body responses" (external_processor.proto).
		out = append(out, d.streamed(&extprocv3.StreamedBodyResponse{Body: piece, EndOfStream: end && len(body) == 0}))
		if len(body) == 0 {
			return out
		}
	}
}

func trailersReply() *extprocv3.ProcessingResponse {
	return &extprocv3.ProcessingResponse{Response: &extprocv3.ProcessingResponse_RequestTrailers{
		RequestTrailers: &extprocv3.TrailersResponse{}}}
}

func set(name, value string) *corev3.HeaderValueOption {
	m := &struct {
		option corev3.HeaderValueOption
		value  corev3.HeaderValue
	}{}
	m.value.Key, m.value.RawValue = name, []byte(value)
	for i, c := range m.value.RawValue { // a line break from a client or an engine would begin another header
		if c < ' ' && c != '\t' || c == 0x7f {
			m.value.RawValue[i] = '_'
		}
	}
	m.option.Header, m.option.AppendAction = &m.value, corev3.HeaderValueOption_OVERWRITE_IF_EXISTS_OR_ADD
	return &m.option
}

// headerMutation sets the endpoint, and the workers for Dynamo's frontend, and removes untrusted headers.
func (s *stream) headerMutation(d *router.Decision) *extprocv3.HeaderMutation {
	type line struct {
		value, header string
		aliases       []string
	}
	lines := []line{{s.endpoints(d), endpointHeader, nil}}
	if !d.InBody {
		lines = append(lines, line{strconv.FormatUint(d.InstanceID, 10), workerHeader, workerAliases})
	}
	if s.cfg.PrimaryPort > 0 {
		lines = append(lines, line{d.Address, dataParallelHeader, nil})
	}
	if !d.RankByAddress && !d.InBody {
		lines = append(lines, line{strconv.FormatUint(uint64(d.Rank), 10), rankHeader, rankAliases})
	}
	if x := d.Prefill; x != nil {
		lines = append(lines, line{strconv.FormatUint(x.InstanceID, 10), prefillHeader, prefillAliases},
			line{strconv.FormatUint(uint64(x.Rank), 10), prefillRankHeader, prefillRankAliases})
		if s.cfg.PrefillerHeader {
			lines = append(lines, line{x.Address, prefillerHeader, nil})
		}
	}
	mutation := &extprocv3.HeaderMutation{
		SetHeaders:    make([]*corev3.HeaderValueOption, 0, 16),
		RemoveHeaders: make([]string, 0, 32),
	}
	name := func(header, value string) { mutation.SetHeaders = append(mutation.SetHeaders, set(header, value)) }
	ours := func(header string) bool {
		return slices.ContainsFunc(mutation.SetHeaders,
			func(o *corev3.HeaderValueOption) bool { return o.Header.Key == header })
	}
	for _, l := range lines {
		name(l.header, l.value)
	}
	for _, l := range lines {
		for _, alias := range l.aliases {
			name(alias, l.value)
		}
	}
	if s.decisionName != "" {
		name(repeatHeader, s.decisionName)
	}
	if d.FirstTokenID != "" {
		name(dynamoIDHeader, d.FirstTokenID)
	}
	if s.head.idGenerated {
		mutation.SetHeaders = append(mutation.SetHeaders, set("x-request-id", s.head.id))
	}
	if s.replacement != nil && s.head.length >= 0 {
		mutation.SetHeaders = append(mutation.SetHeaders, set("content-length", strconv.Itoa(len(s.replacement))))
	}
	if s.forward.Traceparent != "" {
		mutation.SetHeaders = append(mutation.SetHeaders, set(tracing.Traceparent, s.forward.Traceparent))
		if s.forward.Tracestate != "" {
			mutation.SetHeaders = append(mutation.SetHeaders, set(tracing.Tracestate, s.forward.Tracestate))
		}
	}
	if s.replyPlace == inHeaders { // else kvepp removed them when it answered the headers
		mutation.RemoveHeaders = slices.DeleteFunc(s.withheld(mutation.RemoveHeaders), ours)
		// the client's tracestate belongs to another trace
		if s.forward.Traceparent != "" && s.forward.Tracestate == "" {
			mutation.RemoveHeaders = append(mutation.RemoveHeaders, tracing.Tracestate)
		}
	}
	return mutation
}

// withheld appends the client's headers that the endpoint must not see.
func (s *stream) withheld(to []string) []string {
	to = append(append(append(to, protectedHeaders...), body.ObjectiveHeaders...), s.head.unwanted...)
	to = append(append(to, s.cfg.ModelHeaders...), s.cfg.PickerHeaders...)
	if s.cfg.Frontends {
		to = append(to, body.SessionHeaders...)
	}
	if s.cfg.IgnoreHints {
		to = append(to, body.DynamoHintHeaders...)
	}
	return to
}

// endpoints is "ip:port[,ip:port...]" (proposal 004): the endpoint, then the fallbacks.
func (s *stream) endpoints(d *router.Decision) string {
	all := s.cfg.sentTo(d.Address)
	if s.mayRetry() {
		for _, fallback := range d.Fallbacks {
			all += "," + s.cfg.sentTo(fallback)
		}
	}
	return all
}

// endpointMetadata repeats the endpoint as dynamic metadata: header and metadata "both MUST be set" (proposal 004). The
// token is for the access log.
func (s *stream) endpointMetadata(d *router.Decision) *structpb.Struct {
	fields := map[string]*structpb.Value{endpointHeader: structpb.NewStringValue(s.endpoints(d))}
	if s.cfg.EndpointScores {
		fields[scoresKey] = scores(d)
	}
	if s.token != "" {
		fields[tokenKey] = structpb.NewStringValue(s.token)
	}
	return &structpb.Struct{
		Fields: map[string]*structpb.Value{
			endpointNamespace: structpb.NewStructValue(&structpb.Struct{Fields: fields}),
		},
	}
}

// responseHeadersReply changes response headers only if kvepp renames the model in the body, or shows the decision or
// the endpoint that answered.
func (s *stream) responseHeadersReply(servedBy string) *extprocv3.HeadersResponse {
	mutation := &extprocv3.HeaderMutation{}
	if s.renamer != nil {
		mutation.RemoveHeaders = []string{"content-length"} // the new length is known only at the end
	}
	if s.decision != nil && s.cfg.DecisionHeaders {
		mutation.SetHeaders = s.decisionHeaders()
	}
	if s.decision != nil && s.cfg.TokenHeader != "" {
		mutation.SetHeaders = append(mutation.SetHeaders, set(s.cfg.TokenHeader, s.cfg.token(s.decision.Name)))
	}
	if s.cfg.Conformance {
		mutation.SetHeaders = append(mutation.SetHeaders, set(servedByHeader, cmp.Or(servedBy, servedByUnknown)))
	}
	if len(mutation.RemoveHeaders)+len(mutation.SetHeaders) == 0 {
		return &extprocv3.HeadersResponse{}
	}
	return &extprocv3.HeadersResponse{Response: &extprocv3.CommonResponse{HeaderMutation: mutation}}
}

// decisionHeaders returns the headers that show the decision to the client.
func (s *stream) decisionHeaders() []*corev3.HeaderValueOption {
	d := s.decision
	headers := []*corev3.HeaderValueOption{
		set(workerHeaderShown, d.WorkerName()),
		set("x-kvepp-request-id", s.head.id),
		set("x-kvepp-reason", string(d.Reason)),
		set("x-kvepp-prompt-tokens", strconv.Itoa(d.PromptTokens)),
		set("x-kvepp-predicted-cached-tokens", strconv.Itoa(d.PredictedCachedTokens)),
		set("x-kvepp-costs", costs(d.Costs)),
	}
	if x := d.Prefill; x != nil {
		headers = append(headers, set("x-kvepp-prefill-worker", x.Name+"/"+strconv.FormatUint(uint64(x.Rank), 10)),
			set("x-kvepp-prefill-costs", costs(x.Costs)))
	}
	if d.Session != "" {
		headers = append(headers, set("x-kvepp-session", d.Session))
	}
	if d.Waited > 0 {
		headers = append(headers, set("x-kvepp-waited-seconds", strconv.FormatFloat(d.Waited.Seconds(), 'f', 3, 64)))
	}
	if d.UpperBound {
		headers = append(headers, set("x-kvepp-upper-bound", "true"))
	}
	if d.IndexAtBound {
		headers = append(headers, set("x-kvepp-index-at-bound", "true"))
	}
	return headers
}

// costs lists the cost of each candidate of a leg.
func costs(all []router.Cost) string {
	var b strings.Builder
	for i, c := range all {
		if i > 0 {
			b.WriteString(", ")
		}
		fmt.Fprintf(&b, "%s/%d=%.2f", c.Name, c.Rank, c.Cost)
	}
	return b.String()
}
