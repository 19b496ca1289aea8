package router

import (
	"kvepp/prompt/body"
	"kvepp/router/session"
)

// An engine keeps responses of the Responses API in its memory. Requests that continue, read or cancel one must go to
// that engine. Config.Responses knows which one it is, by the id in its response.
//
// Source: vLLM 0.33.0, entrypoints/openai/responses; SGLang 0.5.23, srt/entrypoints/openai/serving_responses.py.

// storedTarget returns the worker that has the stored response which a request names; none if it is not known: then
// the request is routed as any other, and its engine says that there is no such response.
func (r *Router) storedTarget(req *Request, p *prepared) (t target) {
	id := p.previous
	if p.api == 0 {
		id = body.StoredResponse(req.Path)
	}
	if id != "" && r.cfg.Responses != nil {
		t.worker, t.bound = r.cfg.Responses.Find(session.ResponseKeyOf(id))
	}
	if !t.bound && req.Endpoint != "" {
		s := r.pool.Acquire()
		defer s.Release()
		for i := range s.Workers {
			if w := &s.Workers[i]; w.Name == req.Endpoint {
				return target{worker: w.Worker, bound: true, soft: req.EndpointSoft}
			}
		}
	}
	return t
}

// StoresResponse reports whether the endpoint may keep its response for later requests. The caller then calls Responded
// with the response's id.
func (r *Route) StoresResponse() bool { return r.responses != nil }

// Responded notes the id of the response. An id that another worker gave stays there: an engine cannot take over
// another's responses.
func (r *Route) Responded(id string) {
	if r.responses != nil && id != "" {
		r.responses.Put(session.ResponseKeyOf(id), r.destination)
	}
}
