package extproc

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	typev3 "github.com/envoyproxy/go-control-plane/envoy/type/v3"

	"kvepp/internal/apibody"
	"kvepp/router"
)

// httpError is an answer of kvepp's own, in the shape of OpenAI's API.
type httpError struct {
	status  int
	kind    string // OpenAI's "type"
	code    string // OpenAI's "code"; also Envoy's response code details
	param   string // the key of the body at fault; "" for none
	message string
}

// toHTTP is the one place where errors become HTTP.
func toHTTP(err error) *httpError {
	var body *apibody.Error
	switch {
	case errors.As(err, &body):
		return &httpError{http.StatusBadRequest, "invalid_request_error", body.Code, body.Param, body.Message}
	case errors.Is(err, router.ErrUnknownModel):
		return &httpError{http.StatusNotFound, "invalid_request_error", "model_not_found", "model", err.Error()}
	case errors.Is(err, router.ErrNoEndpoints):
		return &httpError{http.StatusServiceUnavailable, "service_unavailable", "no_endpoints", "", err.Error()}
	}
	return &httpError{http.StatusInternalServerError, "internal_error", "internal_error", "", "kvepp could not route the request; its log says why"}
}

func (e *httpError) immediateResponse() *extprocv3.ProcessingResponse {
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
	return &extprocv3.ProcessingResponse{Response: &extprocv3.ProcessingResponse_ImmediateResponse{
		ImmediateResponse: &extprocv3.ImmediateResponse{
			Status: &typev3.HttpStatus{Code: typev3.StatusCode(e.status)},
			Headers: &extprocv3.HeaderMutation{SetHeaders: []*corev3.HeaderValueOption{
				set("content-type", "application/json"),
			}},
			Body:    body,
			Details: "kvepp_" + e.code,
		}}}
}
