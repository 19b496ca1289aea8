package extproc

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/http"
	"strconv"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	typev3 "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"google.golang.org/grpc/codes"

	"kvepp/prompt/body"
	"kvepp/router"
)

// httpError is a response of kvepp itself, in the format of OpenAI's API.
type httpError struct {
	status  int
	kind    string // OpenAI's "type"
	code    string // OpenAI's "code"; also Envoy's response code details
	param   string // the key of the body at fault; "" for none
	message string
	// retryAfter is the Retry-After header, in seconds; 0: none.
	retryAfter int
}

// toHTTP is the one place where errors become HTTP.
func (c *Config) toHTTP(err error) *httpError {
	var payload *body.Error
	var late *router.LateError
	switch {
	case errors.As(err, &payload):
		return &httpError{
			status:  http.StatusBadRequest,
			kind:    "invalid_request_error",
			code:    payload.Code,
			param:   payload.Param,
			message: payload.Message,
		}
	case errors.Is(err, router.ErrUnknownModel):
		return &httpError{
			status:  http.StatusNotFound,
			kind:    "invalid_request_error",
			code:    "model_not_found",
			param:   "model",
			message: err.Error(),
		}
	case errors.Is(err, router.ErrNoEndpoints):
		return &httpError{
			status:  http.StatusServiceUnavailable,
			kind:    "service_unavailable",
			code:    "no_endpoints",
			message: err.Error(),
		}
	case errors.Is(err, router.ErrConstraints):
		return &httpError{
			status:  http.StatusServiceUnavailable,
			kind:    "service_unavailable",
			code:    "constraints_not_met",
			param:   "nvext.routing_constraints",
			message: err.Error(),
		}
	case errors.Is(err, router.ErrNoPrefill):
		return &httpError{
			status:  http.StatusServiceUnavailable,
			kind:    "service_unavailable",
			code:    "no_prefill_worker",
			message: err.Error(),
		}
	case errors.Is(err, router.ErrCordoned):
		return &httpError{
			status:  http.StatusServiceUnavailable,
			kind:    "service_unavailable",
			code:    "cordoned",
			message: err.Error(),
		}
	case errors.Is(err, router.ErrEnding):
		return &httpError{
			status:     http.StatusServiceUnavailable,
			kind:       "service_unavailable",
			code:       "shutting_down",
			message:    err.Error(),
			retryAfter: shedRetryAfter,
		}
	case errors.Is(err, router.ErrOverloaded):
		return c.shed("overloaded", err)
	case errors.Is(err, router.ErrNoRoom):
		return c.shed("no_room", err)
	case errors.Is(err, router.ErrQueueFull):
		return c.shed("queue_full", err)
	case errors.Is(err, router.ErrQueueTimeout):
		return c.shed("queue_timeout", err)
	case errors.Is(err, router.ErrShed):
		return c.shed("shed", err)
	case errors.As(err, &late):
		e := c.shed("deadline", err)
		e.retryAfter = int(math.Ceil(late.Retry.Seconds()))
		return e
	}
	return &httpError{
		status:  http.StatusInternalServerError,
		kind:    "internal_error",
		code:    "internal_error",
		message: "kvepp could not route the request; its log says why",
	}
}

// headersTooLarge answers requests whose headers are above maxHeaderBytes.
var headersTooLarge = &httpError{
	status:  http.StatusRequestHeaderFieldsTooLarge,
	kind:    "invalid_request_error",
	code:    "headers_too_large",
	message: fmt.Sprintf("The request's headers are larger than %d bytes.", maxHeaderBytes),
}

// bodyTooLarge answers requests whose body is above MaxBodyBytes.
func (c *Config) bodyTooLarge() *httpError {
	return &httpError{status: http.StatusRequestEntityTooLarge, kind: "invalid_request_error", code: "body_too_large",
		message: fmt.Sprintf("The request body is larger than %d bytes, the most that is accepted here.",
			c.MaxBodyBytes)}
}

var (
	errTooManyStreams = errors.New("too many requests are running; try again later")
	errTooManyBytes   = errors.New("too many long requests are being read; try again later")
)

// overloadedError is the type of errors that are caused by load alone.
const overloadedError = "overloaded_error"

// shedRetryAfter is the Retry-After of requests that kvepp rejects because of load, in seconds.
const shedRetryAfter = 1

// shed is the response to a request that kvepp rejects because of load.
func (c *Config) shed(code string, err error) *httpError {
	return &httpError{
		status:     c.OverloadStatus,
		kind:       overloadedError,
		code:       code,
		message:    err.Error(),
		retryAfter: shedRetryAfter,
	}
}

// The headers that say why kvepp itself answered: reasonHeader has OpenAI's code; droppedHeader, which clients of
// llm-d's router know, is for requests that were rejected without a mistake of the client. Source of the latter:
// llm-d-router 0.10.
const (
	reasonHeader  = "x-kvepp-reason"
	droppedHeader = "x-llm-d-request-dropped-reason"
)

var droppedReasons = map[string]string{
	"no_endpoints":        "rejected-no-endpoints",
	"no_prefill_worker":   "rejected-no-endpoints",
	"cordoned":            "rejected-no-endpoints",
	"constraints_not_met": "rejected-no-endpoints",
	"overloaded":          "rejected-saturated",
	"no_room":             "rejected-saturated",
	"queue_full":          "rejected-saturated",
	"shed":                "rejected-saturated",
	"deadline":            "rejected-saturated",
	"too_many_requests":   "rejected-saturated",
	"too_many_bytes":      "rejected-saturated",
	"queue_timeout":       "rejected-ttl-expired",
	"shutting_down":       "rejected-shutting-down",
}

// grpcCodes are the codes of HTTP statuses for clients that speak gRPC.
var grpcCodes = map[int]codes.Code{
	http.StatusBadRequest:                  codes.InvalidArgument,
	http.StatusNotFound:                    codes.NotFound,
	http.StatusRequestEntityTooLarge:       codes.ResourceExhausted,
	http.StatusTooManyRequests:             codes.ResourceExhausted,
	http.StatusRequestHeaderFieldsTooLarge: codes.ResourceExhausted,
	http.StatusServiceUnavailable:          codes.Unavailable,
	http.StatusInternalServerError:         codes.Internal,
}

func (e *httpError) immediateResponse(grpc bool) *extprocv3.ProcessingResponse {
	type detail struct {
		Message string  `json:"message"`
		Type    string  `json:"type"`
		Param   *string `json:"param"`
		Code    string  `json:"code"`
	}
	d := detail{Message: e.message, Type: e.kind, Code: e.code}
	if e.param != "" {
		d.Param = &e.param
	}
	body, err := json.Marshal(map[string]detail{"error": d})
	if err != nil { // strings always marshal
		body = fmt.Appendf(nil, `{"error":{"message":"error","type":%q,"param":null,"code":%q}}`, e.kind, e.code)
	}
	var headers []*corev3.HeaderValueOption
	if !grpc {
		headers = append(headers, set("content-type", "application/json"))
	}
	headers = append(headers, set(reasonHeader, e.code))
	if dropped := droppedReasons[e.code]; dropped != "" {
		headers = append(headers, set(droppedHeader, dropped))
	}
	if e.retryAfter > 0 {
		headers = append(headers, set("retry-after", strconv.Itoa(e.retryAfter)))
	}
	response := &extprocv3.ImmediateResponse{
		Status:  &typev3.HttpStatus{Code: typev3.StatusCode(e.status)},
		Headers: &extprocv3.HeaderMutation{SetHeaders: headers},
		Body:    body,
		Details: "kvepp_" + e.code,
	}
	if grpc {
		// "If set, then include a gRPC status trailer"; the body goes "encoded in the grpc-message header"
		// (external_processor.proto).
		code, known := grpcCodes[e.status]
		if !known {
			code = codes.Unavailable // --overload-status-code
		}
		response.GrpcStatus, response.Body = &extprocv3.GrpcStatus{Status: uint32(code)}, []byte(e.message)
	}
	return &extprocv3.ProcessingResponse{
		Response: &extprocv3.ProcessingResponse_ImmediateResponse{ImmediateResponse: response},
	}
}
