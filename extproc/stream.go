package extproc

import (
	"net/http"
	"slices"
	"strconv"
	"strings"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	filterv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"

	"kvepp/internal/tracing"
	"kvepp/prompt/body"
	"kvepp/router"
	"kvepp/router/eject"
)

// maxChunk is the most body bytes in one message to Envoy: a message then fits into gRPC's buffers of 32 KiB. The next
// ones have 1 MiB, and it clears them whole at each use. Several proxies cap a message at 64 KiB.
const maxChunk = 32000

// maxHeaderBytes bounds the names and values of a request's headers. Envoy's default limit is 60 KiB.
const maxHeaderBytes = 512 << 10

// maxDeclared bounds the body bytes that kvepp assumes from content-length alone: a client can declare any length.
const maxDeclared = 1 << 20

// The modes in which a proxy may send bodies.
const (
	fullDuplex      = filterv3.ProcessingMode_FULL_DUPLEX_STREAMED
	buffered        = filterv3.ProcessingMode_BUFFERED
	bufferedPartial = filterv3.ProcessingMode_BUFFERED_PARTIAL
	grpcMessages    = filterv3.ProcessingMode_GRPC
)

// phase is the state of a stream's request. It only moves forward. Messages of the response may come in every phase.
type phase int

const (
	awaitHeaders phase = iota // nothing received yet
	collect                   // request body arriving, not decided
	relay                     // decided: kvepp answers each further piece as it comes
	replied                   // kvepp expects and heeds no more of the request
	closed                    // kvepp may not send any more messages
)

// replyPlace is the message in which kvepp sends a decision.
type replyPlace int

const (
	inHeaders  replyPlace = iota // the usual place
	inBody                       // kvepp has answered the headers already
	inTrailers                   // kvepp has answered the headers already, and there is no body
)

// stream is the state machine of one HTTP request on one ext_proc stream. Its methods are pure: they take a message and
// return messages and effects; they read no clock and do no I/O. Not safe for concurrent use.
type stream struct {
	cfg   *Config
	phase phase

	requestMode    filterv3.ProcessingMode_BodySendMode
	responseMode   filterv3.ProcessingMode_BodySendMode
	head           head
	bodylessReason router.Reason    // why kvepp decides without the body; "": it decides with it
	replyPlace     replyPlace       // in which message kvepp sends the decision
	body           []byte           // what has come of the request body and waits for the decision
	bodySeen       int              // bytes of the request body received, including those no longer in body
	replacement    []byte           // body that goes upstream in place of the client's; nil: the client's goes
	forward        tracing.Context  // trace context for upstream; empty: the client's stays
	ended          bool             // the request is complete, by an end-of-stream flag or by trailers
	endPiece       bool             // the last piece of the body ended the request, and needs a response
	trailers       bool             // trailers wait for the decision
	noTrailers     bool             // the request's protocol has no trailers
	responding     bool             // the response has begun
	renamed        *router.Renamed  // the model's names for client and endpoint; nil: the same
	renamer        *body.Renamer    // renames the model in the response; nil: kvepp does not
	decision       *router.Decision // set when routed; response headers show it if cfg says so
	token          string           // identifies the request in the metadata for the proxy's access log; "": none
	complete       bool             // the whole response has come
	decisionName   string           // value of repeatHeader; "": none
	takesLists     bool             // the proxy takes several endpoints
}

// head is what routing needs of the request headers.
type head struct {
	named       named
	path, id    string
	idGenerated bool // the client sent no request id; kvepp made one
	namesDynamo bool // the client sent dynamoIDHeader
	subset      *subset
	hints       body.Hints
	length      int             // content-length; -1: the client did not say how long the body is
	caller      tracing.Context // the client's trace context, if kvepp traces
	method      string
	opaque      bool     // what follows is not a body that kvepp reads: another protocol, gRPC
	grpc        bool     // gRPC
	encoded     bool     // the body is compressed
	bytes       int      // of all names and values
	unwanted    []string // names of headers that kvepp removes from this request, because it has them
	// decisionName and endpoint are what an earlier call for the same request has set, or forged; "": none.
	decisionName, endpoint string
}

// effect is what one step asks the server to do: first Ask, which yields further messages, then Send in order, then the
// rest.
type effect struct {
	Send []*extprocv3.ProcessingResponse
	// Ask: the request is ready to be routed. The server calls routed or refused with the outcome.
	Ask bool
	// Refuse: kvepp answers the request with this error. The server calls refused.
	Refuse *httpError
	// ServedBy is the endpoint that answered the request according to the proxy, host:port, set in the step that
	// learns it; "" otherwise.
	ServedBy string
	// Status is the response's HTTP status, set in the step that learns it; "" otherwise.
	Status string
	// Failure is the endpoint's failure according to the response headers, with Status; empty: none. OfEndpoint: the
	// response says something about the endpoint; otherwise it is the proxy's own.
	Failure    eject.Cause
	OfEndpoint bool
	// Tries is how many endpoints the proxy says it tried, with ServedBy; 0: it does not say.
	Tries int
	// ContentType and ContentEncoding of the response, with Status.
	ContentType, ContentEncoding string
	// Body is a piece of the response, for the server to read after it was sent on. The server must not change it.
	Body []byte
	// Close: the stream is over; the server returns.
	Close bool
	// Unjudged is why kvepp cannot judge a request in shadow; "" otherwise.
	Unjudged string
	// Note is a name for something unusual that was tolerated, for a log line; "" otherwise.
	Note string
}

// step takes one message from Envoy.
func (s *stream) step(in *extprocv3.ProcessingRequest) effect {
	switch {
	case s.phase == closed:
		return effect{Close: true}
	case in.GetObservabilityMode() && !s.cfg.Shadow:
		// "The server should not respond to this message, as any responses will be ignored" (external_processor.proto):
		// kvepp cannot decide anything.
		return effect{Unjudged: notShadow, Close: true}
	case s.cfg.Shadow && !in.GetObservabilityMode():
		return effect{Unjudged: notObserved, Close: true} // the proxy goes on without kvepp
	}
	switch m := in.Request.(type) {
	case *extprocv3.ProcessingRequest_RequestHeaders:
		return s.requestHeaders(in, m.RequestHeaders)
	case *extprocv3.ProcessingRequest_RequestBody:
		return s.requestBody(m.RequestBody)
	case *extprocv3.ProcessingRequest_RequestTrailers:
		return s.requestTrailers()
	case *extprocv3.ProcessingRequest_ResponseHeaders:
		return s.responseHeaders(in, m.ResponseHeaders)
	case *extprocv3.ProcessingRequest_ResponseBody:
		return s.responseBody(in, m.ResponseBody)
	case *extprocv3.ProcessingRequest_ResponseTrailers:
		return s.responseTrailers(in)
	}
	// Flow-control messages carry no request. "The data plane must not send a message containing only this field [...]
	// unless the ext_proc server has sent a window update" (external_processor.proto), and kvepp sends none.
	return effect{Note: "message without a request"}
}

// learnModes takes the body modes from the first message. "protocol_config is only encoded in the first
// ProcessingRequest message from the client to the server" (external_processor.proto). For a proxy that sends none
// kvepp assumes what the endpoint-picker protocol demands: FULL_DUPLEX_STREAMED both ways.
func (s *stream) learnModes(in *extprocv3.ProcessingRequest) (note string) {
	s.requestMode, s.responseMode = fullDuplex, fullDuplex
	p := in.GetProtocolConfig()
	if p == nil {
		return "no protocol_config: FULL_DUPLEX_STREAMED assumed"
	}
	s.requestMode, s.responseMode = p.GetRequestBodyMode(), p.GetResponseBodyMode()
	switch s.requestMode {
	case fullDuplex, buffered:
		return ""
	case bufferedPartial:
		return "request_body_mode BUFFERED_PARTIAL: requests are routed by load only where the proxy's buffer holds " +
			"less than the whole body"
	}
	name := filterv3.ProcessingMode_BodySendMode_name[int32(s.requestMode)]
	if name == "" {
		name = "that kvepp does not know" // without the number, so that kvepp logs it once
	}
	return "request_body_mode " + name + ": kvepp cannot wait for bodies, so it routes requests by load only. " +
		"Set request_body_mode: FULL_DUPLEX_STREAMED and request_trailer_mode: SEND in the proxy's ext_proc filter " +
		"(manifests/envoy)"
}

// holds reports whether the proxy holds the request until kvepp has answered its body, so that the decision can come
// with that response.
func (s *stream) holds() bool { return s.requestMode == buffered || s.requestMode == bufferedPartial }

func (s *stream) requestHeaders(in *extprocv3.ProcessingRequest, h *extprocv3.HttpHeaders) effect {
	if s.phase != awaitHeaders {
		return effect{Note: "request headers twice, or after the response"}
	}
	e := effect{Note: s.learnModes(in)}
	if s.cfg.Shadow { // Envoy does not say the modes in observability mode, and kvepp answers in none
		e.Note, s.requestMode, s.responseMode = "", fullDuplex, fullDuplex
	}
	s.head = readHead(h.GetHeaders(), s.cfg)
	s.readNamed(h.GetHeaders())
	s.head.subset = readSubset(in.GetMetadataContext())
	if s.cfg.Conformance {
		if selection := readSelection(h.GetHeaders()); selection != nil {
			s.head.subset = selection
		}
	}
	protocol := in.GetAttributes()[attributesNamespace].GetFields()[protocolAttribute].GetStringValue()
	s.noTrailers = strings.HasPrefix(protocol, "HTTP/1")
	s.takesLists = s.takesLists || protocol != "" // only configurations that retry ask for this attribute
	s.ended = h.GetEndOfStream()
	s.phase = collect
	switch {
	case s.head.bytes > maxHeaderBytes:
		e.Refuse = headersTooLarge
	case s.tooLarge(s.head.length):
		e.Refuse = s.cfg.bodyTooLarge()
	case s.ended && s.needsBody():
		e.Ask = true
	case s.ended:
		// "If true, then there is no message body associated with this request" (external_processor.proto).
		s.bodylessReason = router.ReasonNoBody
		e.Ask = true
	case s.cfg.Shadow && !s.cfg.sampled(s.head.id):
		s.bodylessReason = router.ReasonNotSampled
		e.Ask = true
	case s.head.opaque || !body.Reads(s.head.path):
		// kvepp does not read the body, so it does not wait for it: on a WebSocket or a gRPC stream client and server
		// may each wait for the other, for ever.
		s.bodylessReason = router.ReasonUnknownAPI
		e.Ask = true
	case s.head.encoded:
		s.bodylessReason = router.ReasonBodyEncoding // kvepp unpacks nothing: a small body could fill the memory
		e.Ask = true
	case s.head.length > s.cfg.MaxParseBytes && !s.holds():
		s.bodylessReason = router.ReasonBodyTooLarge // the declared length says so: kvepp need not hold any of it
		e.Ask = true
	case s.requestMode == fullDuplex:
		// "The server may also choose to buffer the entire message, including the headers [...], the entire body, and
		// the trailers (if present), before sending back any response" (processing_mode.proto).
	case s.holds():
		// "Buffer the message body in memory and send the entire body at once" (processing_mode.proto): Envoy sends the
		// body after kvepp has answered the headers, so kvepp answers them now. The decision comes with the response to
		// the body. Without a body trailers come next, and headers cannot be changed any more, so kvepp removes
		// untrusted headers now.
		s.replyPlace = inBody
		e.Send = []*extprocv3.ProcessingResponse{{Response: &extprocv3.ProcessingResponse_RequestHeaders{
			RequestHeaders: &extprocv3.HeadersResponse{Response: &extprocv3.CommonResponse{
				HeaderMutation: &extprocv3.HeaderMutation{RemoveHeaders: s.withheld(make([]string, 0, 32))}}}}}}
	default:
		// "When responding to an HttpBody request, header mutations will only take effect if the current processing
		// mode for the body is BUFFERED" (external_processor.proto). So kvepp decides now.
		s.bodylessReason = router.ReasonBodyMode
		e.Ask = true
	}
	return e
}

// mayRetry reports whether kvepp may name endpoints at which the proxy retries. Envoy 1.40 sends the body of a request
// with trailers twice if it may retry (envoyproxy/envoy#46095). So the request must have ended without trailers, or its
// protocol has none.
func (s *stream) mayRetry() bool {
	return s.takesLists && (s.noTrailers || s.ended && !s.trailers && s.replyPlace != inTrailers)
}

// needsBody reports whether engines refuse the request without a body. kvepp then refuses an empty body like any other
// that is not JSON.
func (s *stream) needsBody() bool {
	return s.head.method == http.MethodPost && !s.head.opaque && body.Reads(s.head.path)
}

// tooLarge reports whether a body of n bytes is above MaxBodyBytes.
func (s *stream) tooLarge(n int) bool { return s.cfg.MaxBodyBytes > 0 && n > s.cfg.MaxBodyBytes }

func (s *stream) requestBody(b *extprocv3.HttpBody) effect {
	switch {
	case s.phase == awaitHeaders:
		return effect{Note: "request body before its headers"}
	case s.ended:
		// envoy#46237: the last chunk may come again with end_of_stream. Answering it twice is an error to Envoy.
		return effect{Note: "request body after its end"}
	case s.phase == replied:
		return effect{Note: "request body after a response that did not wait for it"}
	}
	s.ended = b.GetEndOfStream()
	s.endPiece = s.ended
	if s.bodySeen += len(b.GetBody()); s.tooLarge(s.bodySeen) && !s.responding {
		return effect{Refuse: s.cfg.bodyTooLarge()}
	}
	if s.phase == relay {
		if s.ended {
			s.phase = replied
		}
		return effect{Send: s.relayBody(requestDirection, s.requestMode, b)}
	}
	s.gather(b.GetBody())
	if s.requestMode == bufferedPartial && !s.ended {
		// "If the body exceeds the configured buffer limit, then the body contents up to the buffer limit will be sent"
		// (processing_mode.proto). Trailers to come would look the same.
		s.bodylessReason = router.ReasonBodyCut
	}
	return effect{Ask: s.ended || s.holds() || len(s.body) > s.cfg.MaxParseBytes}
}

// gather appends a piece to the body. There is room at once for the length that the headers declare, but at most for
// four times what has come, so that a client cannot reserve memory by content-length alone.
func (s *stream) gather(piece []byte) {
	size := len(s.body) + len(piece)
	switch {
	case len(s.body) == 0 && (s.ended || size >= s.head.length):
		s.body = piece // most likely the whole body
		return
	case size > cap(s.body):
		s.body = slices.Grow(s.body, max(size, min(s.head.length, 4*size))-len(s.body))
	}
	s.body = append(s.body, piece...)
}

// relayBody answers a piece of a body without a change.
func (s *stream) relayBody(
	d direction, mode filterv3.ProcessingMode_BodySendMode, b *extprocv3.HttpBody,
) []*extprocv3.ProcessingResponse {
	switch mode {
	case fullDuplex:
		// "The server needs to send StreamedBodyResponse to the client in the body response" (processing_mode.proto).
		return appendBody(nil, d, b.GetBody(), b.GetEndOfStream())
	case grpcMessages:
		// "Contains a serialized gRPC message" (external_processor.proto): one that is never cut.
		return []*extprocv3.ProcessingResponse{
			d.streamed(&extprocv3.StreamedBodyResponse{Body: b.GetBody(), EndOfStream: b.GetEndOfStream(),
				EndOfStreamWithoutMessage: b.GetEndOfStreamWithoutMessage(),
				GrpcMessageCompressed:     b.GetGrpcMessageCompressed()}),
		}
	}
	return []*extprocv3.ProcessingResponse{d.body(&extprocv3.BodyResponse{})}
}

func (s *stream) requestTrailers() effect {
	switch {
	case s.phase == awaitHeaders:
		return effect{Note: "request trailers before the headers"}
	case s.ended:
		return effect{Note: "request trailers after the end"}
	case s.phase == replied:
		return effect{Note: "request trailers after a response that did not wait for them"}
	}
	s.ended = true
	if s.phase == relay {
		s.phase = replied
		return effect{Send: []*extprocv3.ProcessingResponse{trailersReply()}}
	}
	// "Sending the trailers (if present) is to inform the server that the complete body has arrived"
	// (processing_mode.proto): no body chunk has end_of_stream then.
	if s.holds() { // and no body was sent: there is none
		s.replyPlace = inTrailers
	} else {
		s.trailers = true
	}
	return effect{Ask: true}
}

// request returns the request for the router.
func (s *stream) request() *router.Request {
	r := &router.Request{ID: s.head.id, Path: s.head.path, Hints: s.head.hints, BodylessReason: s.bodylessReason,
		Rewrite: s.head.named.model, Endpoint: s.head.named.endpoint, EndpointSoft: s.cfg.TokenSoft,
		ResponseUnseen: s.responseMode == filterv3.ProcessingMode_NONE, NamesDynamo: s.head.namesDynamo}
	if s.head.subset != nil {
		r.Allowed = s.head.subset.allows
	}
	switch {
	case s.bodylessReason == router.ReasonNoBody:
	case s.bodylessReason != "":
		r.BodyBytes = max(len(s.body), min(s.head.length, maxDeclared))
	case len(s.body) == 0 && s.needsBody():
		r.Body = []byte{}
	case len(s.body) == 0:
		r.BodylessReason = router.ReasonNoBody
	case len(s.body) > s.cfg.MaxParseBytes:
		r.BodylessReason, r.BodyBytes = router.ReasonBodyTooLarge, len(s.body)
	default:
		r.Body = s.body
	}
	return r
}

// routed returns the messages of a decision. "The server response has to maintain the headers-body-trailers ordering"
// (processing_mode.proto).
func (s *stream) routed(d *router.Decision) effect {
	s.decision = d
	common := &extprocv3.CommonResponse{HeaderMutation: s.headerMutation(d), ClearRouteCache: true}
	var first *extprocv3.ProcessingResponse
	switch s.replyPlace {
	case inHeaders:
		first = &extprocv3.ProcessingResponse{Response: &extprocv3.ProcessingResponse_RequestHeaders{
			RequestHeaders: &extprocv3.HeadersResponse{Response: common}}}
	case inBody:
		if s.replacement != nil {
			common.BodyMutation = &extprocv3.BodyMutation{Mutation: &extprocv3.BodyMutation_Body{Body: s.replacement}}
		}
		first = requestDirection.body(&extprocv3.BodyResponse{Response: common})
	case inTrailers:
		first = trailersReply() // headers cannot be changed any more; the metadata name the endpoint
	}
	first.DynamicMetadata = s.endpointMetadata(d)
	out := []*extprocv3.ProcessingResponse{first}
	if s.replyPlace == inHeaders {
		whole := s.body
		if s.replacement != nil { // then the body is complete
			whole = s.replacement
		}
		ends := s.ended && !s.trailers
		if len(whole) > 0 || s.endPiece && ends { // also the end of an empty body
			out = appendBody(out, requestDirection, whole, ends)
		}
		if s.trailers {
			out = append(out, trailersReply())
		}
	}
	s.body = nil // Envoy has it now
	if s.phase = replied; !s.ended {
		s.phase = relay
	}
	return effect{Send: out}
}

// refused answers the request with an error of kvepp's own. Nothing may follow an ImmediateResponse.
func (s *stream) refused(e *httpError) effect {
	s.phase, s.body = closed, nil
	return effect{Send: []*extprocv3.ProcessingResponse{e.immediateResponse(s.head.grpc)}, Close: true}
}

// beginResponse is called with each message of the response. From the first it returns the endpoint that answered,
// after all retries. It is "" without an override_host policy. Source: proposal 004, v1.0.
func (s *stream) beginResponse(in *extprocv3.ProcessingRequest) (servedBy string) {
	if s.responding {
		return ""
	}
	s.responding = true
	if s.phase == awaitHeaders { // the stream begins with the response: kvepp only relays it
		s.learnModes(in)
	}
	if s.phase < relay { // Envoy answered an incomplete request itself: there is nothing left to decide
		s.phase, s.body = replied, nil
	}
	by := in.GetMetadataContext().GetFilterMetadata()[endpointNamespace].GetFields()[servedByKey].GetStringValue()
	return s.servedAt(by)
}

func (s *stream) responseHeaders(in *extprocv3.ProcessingRequest, h *extprocv3.HttpHeaders) effect {
	e := effect{ServedBy: s.beginResponse(in)}
	s.complete = s.complete || h.GetEndOfStream()
	for _, v := range h.GetHeaders().GetHeaders() {
		switch v.GetKey() {
		case ":status":
			e.Status = headerValue(v)
		case "content-type":
			e.ContentType = headerValue(v)
		case "content-encoding":
			e.ContentEncoding = headerValue(v)
		}
	}
	v := readVerdict(in)
	e.Tries = v.tries
	e.Failure, e.OfEndpoint = v.failure(e.Status)
	if s.renamed != nil && !h.GetEndOfStream() {
		switch {
		case s.responseMode != fullDuplex && s.responseMode != buffered:
			e.Note = "response_body_mode is neither FULL_DUPLEX_STREAMED nor BUFFERED: responses keep the name of " +
				"the model that a request was rewritten to"
		case e.ContentEncoding != "" && e.ContentEncoding != "identity":
			e.Note = "compressed responses keep the name of the model that a request was rewritten to"
		default:
			s.renamer = body.NewRenamer(s.renamed.Upstream, s.renamed.Requested)
		}
	}
	reply := s.responseHeadersReply(e.ServedBy)
	e.Send = []*extprocv3.ProcessingResponse{
		{Response: &extprocv3.ProcessingResponse_ResponseHeaders{ResponseHeaders: reply}},
	}
	return e
}

func (s *stream) responseBody(in *extprocv3.ProcessingRequest, b *extprocv3.HttpBody) effect {
	s.complete = s.complete || b.GetEndOfStream()
	if s.renamer != nil {
		return effect{ServedBy: s.beginResponse(in), Body: b.GetBody(), Send: s.renameBody(b)}
	}
	return effect{
		ServedBy: s.beginResponse(in),
		Body:     b.GetBody(),
		Send:     s.relayBody(responseDirection, s.responseMode, b),
	}
}

// renameBody answers a piece of the response with the renamed bytes that are ready to go on.
func (s *stream) renameBody(b *extprocv3.HttpBody) []*extprocv3.ProcessingResponse {
	if s.responseMode == buffered { // the piece is the whole body
		return []*extprocv3.ProcessingResponse{
			responseDirection.body(&extprocv3.BodyResponse{Response: &extprocv3.CommonResponse{
				BodyMutation: &extprocv3.BodyMutation{
					Mutation: &extprocv3.BodyMutation_Body{Body: s.renamer.Next(b.GetBody(), true)},
				}}}),
		}
	}
	body := s.renamer.Next(b.GetBody(), b.GetEndOfStream())
	if len(body) == 0 && !b.GetEndOfStream() {
		// "The server may choose to buffer any number of chunks of data before processing them" (processing_mode.proto)
		return nil
	}
	return appendBody(nil, responseDirection, body, b.GetEndOfStream())
}

func (s *stream) responseTrailers(in *extprocv3.ProcessingRequest) effect {
	e := effect{ServedBy: s.beginResponse(in)}
	s.complete = true
	if s.renamer != nil && s.responseMode == fullDuplex {
		if rest := s.renamer.Rest(); len(rest) > 0 {
			e.Send = appendBody(e.Send, responseDirection, rest, false)
		}
	}
	e.Send = append(e.Send, &extprocv3.ProcessingResponse{Response: &extprocv3.ProcessingResponse_ResponseTrailers{
		ResponseTrailers: &extprocv3.TrailersResponse{}}})
	return e
}

// kept returns what kvepp needs of a head during the response. The texts of all headers share one allocation, which
// kept releases unless it is small.
func (h head) kept() head {
	h.hints, h.subset, h.caller, h.unwanted = body.Hints{}, nil, tracing.Context{}, nil
	h.decisionName, h.endpoint = "", ""
	if h.bytes > headBytes {
		h.path, _, _ = strings.Cut(h.path, "?")
		h.path, h.id, h.method = router.Clip(h.path), router.Clip(h.id), router.Clip(h.method)
	}
	return h
}

// readHead reads a request's headers; the trace context only if requests are traced.
func readHead(m *corev3.HeaderMap, cfg *Config) head {
	h := head{length: -1}
	var hints body.HeaderHints
	sender := ""
	for _, v := range m.GetHeaders() {
		h.bytes += len(v.GetKey()) + len(v.GetRawValue()) + len(v.GetValue())
		switch name := strings.ToLower(v.GetKey()); name {
		case ":path":
			h.path = headerValue(v)
		case ":method":
			h.method = headerValue(v)
			h.opaque = h.opaque || h.method == http.MethodConnect
		case "upgrade":
			h.opaque = h.opaque || strings.EqualFold(headerValue(v), "websocket")
		case "content-type":
			h.grpc = strings.HasPrefix(headerValue(v), "application/grpc")
			h.opaque = h.opaque || h.grpc
		case "x-request-id":
			h.id = headerValue(v)
		case dynamoIDHeader:
			h.namesDynamo = true
		case "content-length":
			if n, err := strconv.ParseUint(headerValue(v), 10, 62); err == nil {
				h.length = int(n)
			}
		case "content-encoding", "x-body-compressed": // the latter: SGLang's own
			coding := strings.TrimSpace(headerValue(v))
			h.encoded = h.encoded || coding != "" && !strings.EqualFold(coding, "identity")
		case tracing.Traceparent, tracing.Tracestate:
			if cfg.Tracer != nil {
				h.caller.Add(name, headerValue(v))
			}
		case endpointHeader:
			h.endpoint = headerValue(v)
		case repeatHeader:
			h.decisionName, h.unwanted = headerValue(v), append(h.unwanted, name)
		default:
			if strings.HasPrefix(name, overridePrefix) {
				h.unwanted = append(h.unwanted, name)
			}
			hints.Add(name, headerValue(v))
			if name == cfg.TenantHeader {
				sender = headerValue(v)
			}
		}
	}
	h.hints = hints.Hints()
	h.hints.Sender = sender
	return h
}

// headerValue reads either form: Envoy fills raw_value, some other proxies value.
func headerValue(v *corev3.HeaderValue) string {
	if len(v.GetRawValue()) > 0 {
		return string(v.GetRawValue())
	}
	return v.GetValue()
}

// validStatus reports whether status is one of HTTP's, so that the label of a metric has few values.
func validStatus(status string) bool {
	return len(status) == 3 && status[0] >= '1' && status[0] <= '5' &&
		http.StatusText(int(status[0]-'0')*100+int(status[1]-'0')*10+int(status[2]-'0')) != ""
}
