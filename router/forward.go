package router

import "kvepp/prompt/body"

// The bodies that endpoints get in place of the clients'.

// saltPrefix marks cache salts of stock vLLM that stand for cache namespaces; KV events repeat it. Source:
// dynamo-kv-router 1.6.1, CacheSaltForwarding::NativeVllm.
const saltPrefix = "dynamo-cache-salt:"

// changes returns what is changed in every body that was read. A pin that is not followed is removed: Dynamo's frontend
// would follow it.
func (c *Config) changes() body.Changes {
	return body.Changes{
		RemovePins:   !c.Pinning || c.IgnoreHints,
		RemoveLegacy: c.Frontends,
	}
}

// heedsTenants reports whether the endpoints keep the blocks of tenants apart.
func (c *Config) heedsTenants() bool { return c.Frontends || c.TenantSalt }

// namespace returns the cache namespace of a request: its tenant if tenants are heeded, else the body's cache salt.
func (c *Config) namespace(payload *body.Request, tenant string) string {
	if tenant != "" && c.heedsTenants() && !c.IgnoreHints {
		return tenant
	}
	return payload.CacheSalt
}

// setBody sets what the endpoint gets in place of the request's body.
func (r *Router) setBody(route *Route, p *prepared, req *Request) {
	route.Body, route.Renamed = p.forward, p.renamed
	tokens := p.tokenData && route.sameTokenizer
	if p.inject == nil || !tokens && !route.InBody {
		return
	}
	changes := r.cfg.changes()
	if p.renamed != nil {
		changes.Model = p.renamed.Upstream
	}
	if tokens { // so that the frontend need not compute them again
		changes.TokenData = make([]uint32, len(p.tokens[0].IDs))
		for i, id := range p.tokens[0].IDs {
			changes.TokenData[i] = uint32(id)
		}
		r.metrics.Injected.Inc()
	}
	if route.InBody {
		changes.Decode = &body.Pin{InstanceID: route.InstanceID, Rank: route.Rank}
	}
	route.Body = p.inject.Forward(req.Body, changes)
}
