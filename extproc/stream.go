package extproc

import (
	"bytes"
	"net/http"
	"strings"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	filterv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"

	"kvepp/internal/apibody"
	"kvepp/router"
)

// maxChunk is the most body bytes in one message to Envoy. Source: endpoint-picker protocol, reference implementation;
// several proxies cap a gRPC message at 64 KiB.
const maxChunk = 62000

// phase is where a stream stands. It only ever moves forward.
type phase int

const (
	awaitHeaders phase = iota // nothing received yet
	collect                   // request body arriving, nothing answered: the header reply waits for the decision
	relay                     // decided before the body was complete; each further piece is answered as it comes
	respond                   // request phase answered; the response comes
	closed                    // nothing more may be sent
)

// stream is one HTTP request as Envoy tells it over one ext_proc stream. Its methods are pure: messages in, messages and
// wishes out; they read no clock, do no I/O and call nobody. Not safe for concurrent use.
type stream struct {
	cfg   *Config
	phase phase

	requestMode  filterv3.ProcessingMode_BodySendMode
	responseMode filterv3.ProcessingMode_BodySendMode
	head         head
	chunks       [][]byte // request body as received, in order
	size         int      // bytes in chunks
	instead      []byte   // what goes upstream in place of chunks; nil: they do
	ended        bool     // the request is complete, by an end-of-stream flag or by trailers
	trailers     *extprocv3.ProcessingRequest_RequestTrailers
	decision     *router.Decision // set when routed; explains itself in response headers when cfg says so
}

// head is what routing needs of the request headers.
type head struct {
	path, id string
	idMade   bool // the client sent no request id; kvepp made one
	subset   *subset
	hints    apibody.Hints
	length   bool // the client said how long the body is
}

// effect is what one step asks the server to do: first Ask (its answer brings further messages), then Send in order, then
// the rest.
type effect struct {
	Send []*extprocv3.ProcessingResponse
	// Ask: the request is ready to be routed. The server calls routed or refused with the outcome.
	Ask bool
	// Status is the response's HTTP status, when it was just seen; "" otherwise.
	Status string
	// ContentType and ContentEncoding of the response, with Status.
	ContentType, ContentEncoding string
	// Body is a piece of the response, to be looked at after it was sent on. The server must not change it.
	Body []byte
	// Close: the stream is over; the server returns.
	Close bool
	// Note is a name for something unusual that was tolerated, for a log line; "" otherwise.
	Note string
}

// step takes one message from Envoy.
func (s *stream) step(in *extprocv3.ProcessingRequest) effect {
	if s.phase == closed {
		return effect{Close: true}
	}
	switch m := in.Request.(type) {
	case *extprocv3.ProcessingRequest_RequestHeaders:
		return s.requestHeaders(in, m.RequestHeaders)
	case *extprocv3.ProcessingRequest_RequestBody:
		return s.requestBody(m.RequestBody)
	case *extprocv3.ProcessingRequest_RequestTrailers:
		return s.requestTrailers(m)
	case *extprocv3.ProcessingRequest_ResponseHeaders:
		return s.responseHeaders(in, m.ResponseHeaders)
	case *extprocv3.ProcessingRequest_ResponseBody:
		return s.responseBody(m.ResponseBody)
	case *extprocv3.ProcessingRequest_ResponseTrailers:
		return effect{Send: []*extprocv3.ProcessingResponse{{Response: &extprocv3.ProcessingResponse_ResponseTrailers{
			ResponseTrailers: &extprocv3.TrailersResponse{}}}}}
	}
	// Flow-control messages carry no request. The protocol: a server that never sent a window update is sent none.
	return effect{Note: "message without a request"}
}

// learnModes takes the body modes from the first message. "protocol_config is only encoded in the first ProcessingRequest
// message from the client to the server" (external_processor.proto). A proxy that sends none is taken to do what the
// endpoint-picker protocol demands: FULL_DUPLEX_STREAMED both ways.
func (s *stream) learnModes(in *extprocv3.ProcessingRequest) (note string) {
	s.requestMode = filterv3.ProcessingMode_FULL_DUPLEX_STREAMED
	s.responseMode = filterv3.ProcessingMode_FULL_DUPLEX_STREAMED
	p := in.GetProtocolConfig()
	if p == nil {
		return "no protocol_config: FULL_DUPLEX_STREAMED assumed"
	}
	s.requestMode, s.responseMode = p.GetRequestBodyMode(), p.GetResponseBodyMode()
	if s.requestMode != filterv3.ProcessingMode_FULL_DUPLEX_STREAMED {
		return "request_body_mode " + s.requestMode.String() + ": the body cannot be waited for, requests are routed by load only"
	}
	return ""
}

func (s *stream) requestHeaders(in *extprocv3.ProcessingRequest, h *extprocv3.HttpHeaders) effect {
	if s.phase != awaitHeaders {
		return effect{Note: "request headers twice"}
	}
	note := s.learnModes(in)
	s.head = readHead(h.GetHeaders())
	s.head.subset = readSubset(in.GetMetadataContext())
	s.ended = h.GetEndOfStream()
	s.phase = collect
	// Header-only requests are answered at once. So are requests in the other body modes: in BUFFERED mode Envoy waits
	// for the header reply before it sends the body, and in STREAMED and NONE later header mutations are ignored.
	ask := s.ended || s.requestMode != filterv3.ProcessingMode_FULL_DUPLEX_STREAMED
	return effect{Ask: ask, Note: note}
}

func (s *stream) requestBody(b *extprocv3.HttpBody) effect {
	switch {
	case s.phase == awaitHeaders:
		return effect{Note: "request body before its headers"}
	case s.ended:
		// envoy#46237: the last chunk may come again with end_of_stream. Answering it twice is an error to Envoy.
		return effect{Note: "request body after its end"}
	case s.requestMode != filterv3.ProcessingMode_FULL_DUPLEX_STREAMED:
		s.ended = b.GetEndOfStream()
		return effect{Send: []*extprocv3.ProcessingResponse{{Response: &extprocv3.ProcessingResponse_RequestBody{
			RequestBody: &extprocv3.BodyResponse{}}}}}
	}
	s.ended = b.GetEndOfStream()
	if s.phase == relay {
		if s.ended {
			s.phase = respond
		}
		return effect{Send: appendBody(nil, requestDirection, b.GetBody(), s.ended)}
	}
	s.size += len(b.GetBody())
	s.chunks = append(s.chunks, b.GetBody())
	return effect{Ask: s.ended || s.size > s.cfg.MaxParseBytes}
}

func (s *stream) requestTrailers(m *extprocv3.ProcessingRequest_RequestTrailers) effect {
	switch {
	case s.phase == awaitHeaders:
		return effect{Note: "request trailers before the headers"}
	case s.phase == relay, s.requestMode != filterv3.ProcessingMode_FULL_DUPLEX_STREAMED:
		s.ended, s.phase = true, respond
		return effect{Send: []*extprocv3.ProcessingResponse{trailersReply()}}
	case s.ended:
		return effect{Note: "request trailers after the end"}
	}
	// A request with trailers has no end-of-stream body chunk: this is the moment when it is complete.
	s.ended, s.trailers = true, m
	return effect{Ask: true}
}

// request returns what the router is to route. The body is joined only here, and not copied when it came in one piece.
func (s *stream) request() *router.Request {
	r := &router.Request{ID: s.head.id, Path: s.head.path, Hints: s.head.hints}
	if s.head.subset != nil {
		r.Allowed = s.head.subset.allows
	}
	switch {
	case s.requestMode != filterv3.ProcessingMode_FULL_DUPLEX_STREAMED && !s.ended:
		r.Without = router.ReasonBodyMode
	case len(s.chunks) == 0 || s.size == 0:
		r.Without = router.ReasonNoBody
	case s.size > s.cfg.MaxParseBytes:
		r.Without, r.BodyBytes = router.ReasonBodyTooLarge, s.size
	case len(s.chunks) == 1 || len(s.chunks[0]) == s.size:
		r.Body = s.chunks[0]
	default:
		r.Body = bytes.Join(s.chunks, nil)
	}
	return r
}

// routed answers the request phase: "you may delay the header reply until after the full body", then header reply, body
// pieces, trailers, in this order.
func (s *stream) routed(d *router.Decision) effect {
	s.decision = d
	if s.instead != nil { // then the body is complete
		s.chunks = [][]byte{s.instead}
	}
	out := []*extprocv3.ProcessingResponse{s.headersReply(d)}
	if s.requestMode == filterv3.ProcessingMode_FULL_DUPLEX_STREAMED {
		for i, c := range s.chunks {
			last := i == len(s.chunks)-1 && s.ended && s.trailers == nil
			if len(c) > 0 || last {
				out = appendBody(out, requestDirection, c, last)
			}
		}
	}
	if s.trailers != nil {
		out = append(out, trailersReply())
	}
	s.chunks = nil // Envoy has them now
	if s.phase = respond; !s.ended {
		s.phase = relay
	}
	return effect{Send: out}
}

// refused answers the request with an error of kvepp's own. Nothing may follow an ImmediateResponse.
func (s *stream) refused(e *httpError) effect {
	s.phase, s.chunks = closed, nil
	return effect{Send: []*extprocv3.ProcessingResponse{e.immediateResponse()}, Close: true}
}

func (s *stream) responseHeaders(in *extprocv3.ProcessingRequest, h *extprocv3.HttpHeaders) effect {
	if s.phase == awaitHeaders { // a stream that begins in the response phase: nothing to decide, only to relay
		s.learnModes(in)
	}
	s.phase = respond
	e := effect{Send: []*extprocv3.ProcessingResponse{{Response: &extprocv3.ProcessingResponse_ResponseHeaders{
		ResponseHeaders: s.responseHeadersReply()}}}}
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
	return e
}

func (s *stream) responseBody(b *extprocv3.HttpBody) effect {
	e := effect{Body: b.GetBody()}
	if s.responseMode != filterv3.ProcessingMode_FULL_DUPLEX_STREAMED {
		e.Send = []*extprocv3.ProcessingResponse{{Response: &extprocv3.ProcessingResponse_ResponseBody{
			ResponseBody: &extprocv3.BodyResponse{}}}}
		return e
	}
	e.Send = appendBody(nil, responseDirection, b.GetBody(), b.GetEndOfStream())
	return e
}

func readHead(m *corev3.HeaderMap) head {
	var h head
	var hints apibody.HeaderHints
	for _, v := range m.GetHeaders() {
		switch name := strings.ToLower(v.GetKey()); name {
		case ":path":
			h.path = headerValue(v)
		case "x-request-id":
			h.id = headerValue(v)
		case "content-length":
			h.length = true
		default:
			hints.Add(name, headerValue(v))
		}
	}
	h.hints = hints.Hints()
	return h
}

// headerValue reads either form: Envoy fills raw_value, some other proxies value.
func headerValue(v *corev3.HeaderValue) string {
	if len(v.GetRawValue()) > 0 {
		return string(v.GetRawValue())
	}
	return v.GetValue()
}

// validStatus keeps a metric's label within what HTTP allows.
func validStatus(status string) bool {
	return len(status) == 3 && status[0] >= '1' && status[0] <= '5' && http.StatusText(int(status[0]-'0')*100+int(status[1]-'0')*10+int(status[2]-'0')) != ""
}
