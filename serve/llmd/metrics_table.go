package llmd

import "kvepp/internal/metrics"

// The values of --metrics-compat.
const (
	compatNone = "none"
	compatLLMD = "llm-d" // the names of llm-d
	compatAll  = "all"   // and the older ones that llm-d still exports
)

// Labels of llm-d that kvepp does not tell apart.
const (
	oneFlow     = `fairness_id="default-flow"`
	onePriority = `priority="0"`
)

// Twins returns the metrics that repeat kvepp's under the names of llm-d's picker: those that its dashboards, alerts
// and autoscalers read. pool is the name of the InferencePool.
//
// Source: llm-d-router v0.11, docs/metrics.md.
func Twins(compat, pool string) []metrics.Twin {
	if compat == compatNone {
		return nil
	}
	const epp, old, scheduler = "llm_d_epp_", "inference_extension_", "llm_d_inference_scheduler_"
	const objective, ofPool = "inference_objective_", "inference_pool_"
	model := []string{"model_name=model_name", "target_model_name=target_model_name"}
	flow := append([]string{oneFlow, onePriority}, model...)
	of := func(name, source string, labels ...string) metrics.Twin {
		return metrics.Twin{Name: epp + name, Of: source, Labels: labels}
	}
	inPool := `inference_pool="` + pool + `"`
	queued := metrics.Twin{Name: epp + "flow_control_queue_size",
		Of:     "dynamo_frontend_router_queue_pending_requests",
		Zero:   objective + "running_requests",
		Labels: []string{oneFlow, onePriority, inPool, "model_name=model", "target_model_name=model"}}
	saturation := metrics.Twin{Name: epp + "flow_control_pool_saturation", Labels: []string{inPool}, Value: saturation}
	plugin := func(name, kind, phase string) metrics.Twin {
		return metrics.Twin{Name: name + "plugin_duration_seconds", Of: "kvepp_phase_seconds", Only: "phase=" + phase,
			Labels: []string{`extension_point="DataProducer"`, `plugin_type="` + kind + `"`,
				`plugin_name="` + kind + `"`}}
	}
	split := func(prefix, role, decision string) metrics.Twin {
		return metrics.Twin{Name: prefix + "decision_total", Of: "kvepp_selections_total", Only: "role=" + role,
			Labels: []string{`plugin_name="disagg-profile-handler"`, `plugin_type="disagg-profile-handler"`,
				`model_name=""`, `decision_type="` + decision + `"`}}
	}
	outcome := func(name, source, only string) metrics.Twin {
		return metrics.Twin{Name: epp + "flow_control_requests_total", Of: source, Only: only,
			Labels: []string{`outcome="` + name + `"`, onePriority, inPool}}
	}
	waited := of("flow_control_request_queue_duration_seconds", "kvepp_queue_wait_seconds", oneFlow, onePriority,
		inPool, `outcome="Dispatched"`)
	cached := func(name, rung string) metrics.Twin {
		return metrics.Twin{Name: epp + "prefix_" + name, Of: "kvepp_ladder_tokens_total", Only: "rung=" + rung,
			Labels: []string{`plugin_type="precise-prefix-cache-producer"`,
				`plugin_name="precise-prefix-cache-producer"`, `endpoint_role=""`}}
	}
	running := func(name, source string) metrics.Twin {
		return of(name, source, "endpoint_name=worker", `producer_name="inflight-load-producer"`, oneFlow, onePriority)
	}
	all := []metrics.Twin{
		of("request_total", objective+"request_total", append([]string{oneFlow, "priority=priority"}, model...)...),
		of("request_error_total", objective+"request_error_total",
			append([]string{"error_code=error_code"}, flow...)...),
		of("request_duration_seconds", objective+"request_duration_seconds", flow...),
		of("request_size_bytes", objective+"request_sizes", flow...),
		of("response_size_bytes", objective+"response_sizes", flow...),
		of("request_input_tokens", objective+"input_tokens", flow...),
		of("request_output_tokens", objective+"output_tokens", flow...),
		of("request_cached_tokens", objective+"prompt_cached_tokens", flow...),
		of("request_running", objective+"running_requests", oneFlow, onePriority, "model_name=model_name",
			"target_model_name=model_name"),
		of("request_ntpot_seconds", objective+"normalized_time_per_output_token_seconds", flow...),
		of("request_ttft_seconds", objective+"request_ttft_seconds", append([]string{`streaming="true"`}, flow...)...),
		of("request_streaming_tpot_seconds", objective+"request_tpot_seconds", flow...),
		of("average_kv_cache_utilization", ofPool+"average_kv_cache_utilization", "name=name"),
		of("average_queue_size", ofPool+"average_queue_size", "name=name"),
		of("average_running_requests", ofPool+"average_running_requests", "name=name"),
		of("ready_endpoints", ofPool+"ready_pods", "name=name"),
		of("per_endpoint_queue_size", ofPool+"per_pod_queue_size", "name=name",
			"model_server_endpoint=model_server_pod"),
		of("scheduler_e2e_duration_seconds", old+"scheduler_e2e_duration_seconds"),
		of("scheduler_attempts_total", old+"scheduler_attempts_total", "status=status"),
		of("model_rewrite_decisions_total", old+"model_rewrite_decisions_total",
			"model_rewrite_name=model_rewrite_name", "model_name=model_name", "target_model=target_model"),
		of("prefix_indexer_size", old+"prefix_indexer_size"),
		of("prefix_indexer_hit_ratio", old+"prefix_indexer_hit_ratio"),
		of("info", "kvepp_build_info", "build_ref=version", `commit=""`),
		plugin(epp, "token-producer", "tokenize"), plugin(epp, "precise-prefix-cache-producer", "match"),
		queued, saturation, waited,
		outcome("Dispatched", objective+"request_total", ""),
		outcome("RejectedCapacity", "kvepp_rejections_total", "cause=overloaded,queue_full,queue_limit"),
		outcome("EvictedTTL", "kvepp_rejections_total", "cause=queue_timeout"),
		running("inflight_requests", "kvepp_worker_active_requests"),
		running("inflight_tokens", "kvepp_worker_active_tokens"),
		split(epp+"disagg_", "aggregated", "decode-only"), split(epp+"disagg_", "decode", "prefill-decode"),
		cached("predicted_cached_tokens_sum", "chosen"), cached("prompt_tokens_sum", "prompt"),
		{Name: epp + "kv_cache_events_active_subscribers", Of: "kvepp_subscriptions", Only: "state=connected"},
		{Name: epp + "kv_cache_events_messages_received_total", Of: "kvepp_events_total", Only: "kind=batch"},
	}
	if compat != compatAll {
		return all
	}
	older := func(twin metrics.Twin, name string) metrics.Twin { twin.Name = name; return twin }
	return append(all,
		older(queued, old+"flow_control_queue_size"), older(saturation, old+"flow_control_pool_saturation"),
		older(waited, old+"flow_control_request_queue_duration_seconds"),
		plugin(old, "token-producer", "tokenize"), plugin(old, "precise-prefix-cache-producer", "match"),
		split(scheduler+"disagg_", "aggregated", "decode-only"), split(scheduler+"disagg_", "decode", "prefill-decode"),
		split(scheduler+"pd_", "aggregated", "decode-only"), split(scheduler+"pd_", "decode", "prefill-decode"))
}

// saturation is that of llm-d's utilization detector with its defaults, of the pool's averages; 1 for an empty pool.
func saturation(of func(string) float64) float64 {
	if of("inference_pool_ready_pods") == 0 {
		return 1
	}
	return max(of("inference_pool_average_queue_size")/5, of("inference_pool_average_kv_cache_utilization")/0.8)
}
