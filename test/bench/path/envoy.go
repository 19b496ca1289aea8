package main

import (
	"encoding/json"
	"fmt"
	"maps"
)

// column is one way through Envoy.
type column struct {
	name      string
	listen    int
	processor *program // nil: none
	// bodiless: the processor does not get the bodies of responses.
	bodiless bool
	shadow   bool // the processor is kvepp in shadow, as in manifests/envoy/shadow.yaml
}

type object = map[string]any

// envoyConfig returns Envoy's configuration: a listener for each column and the same upstream for all.
func envoyConfig(columns []*column, upstream int) ([]byte, error) {
	typed := func(name string, more object) object {
		more["@type"] = "type.googleapis.com/" + name
		return more
	}
	address := func(port int) object {
		return object{"socket_address": object{"address": "127.0.0.1", "port_value": port}}
	}
	cluster := func(name string, port int, http2 bool) object {
		c := object{"name": name, "type": "STATIC", "connect_timeout": "10s",
			"circuit_breakers": object{
				"thresholds": []object{
					{"max_connections": 65536, "max_pending_requests": 65536, "max_requests": 65536},
				},
			},
			"load_assignment": object{
				"cluster_name": name,
				"endpoints":    []object{{"lb_endpoints": []object{{"endpoint": object{"address": address(port)}}}}},
			}}
		if http2 {
			c["typed_extension_protocol_options"] = object{
				"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": typed(
					// those of manifests/envoy
					"envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
					object{
						"explicit_http_config": object{
							"http2_protocol_options": object{
								"max_outbound_frames":         4000000,
								"max_outbound_control_frames": 1000000,
								"max_concurrent_streams":      250,
							},
						},
					},
				),
			}
		}
		return c
	}
	clusters, listeners := []object{cluster("upstream", upstream, false)}, []object{}
	for i, c := range columns {
		filters := []object{}
		if c.processor != nil {
			name := fmt.Sprintf("processor-%d", i)
			clusters = append(clusters, cluster(name, c.processor.port, true))
			if c.shadow {
				maps.Copy(clusters[len(clusters)-1], object{"per_connection_buffer_limit_bytes": 0,
					"common_lb_config": object{"healthy_panic_threshold": object{"value": 0}},
					"health_checks": []object{{"timeout": "1s", "interval": "1s", "no_traffic_interval": "1s",
						"unhealthy_threshold": 2, "healthy_threshold": 1, "grpc_health_check": object{
							"service_name": "envoy.service.ext_proc.v3.ExternalProcessor"}}},
					"close_connections_on_host_health_failure": true})
			}
			mode := object{
				"request_header_mode":   "SEND",
				"request_body_mode":     "FULL_DUPLEX_STREAMED",
				"request_trailer_mode":  "SEND",
				"response_header_mode":  "SEND",
				"response_body_mode":    "FULL_DUPLEX_STREAMED",
				"response_trailer_mode": "SEND",
			}
			if c.bodiless {
				mode["response_body_mode"] = "NONE"
			}
			processor := object{
				"grpc_service":    object{"envoy_grpc": object{"cluster_name": name}, "timeout": "0s"},
				"message_timeout": "30s", "processing_mode": mode,
				"metadata_options": object{"receiving_namespaces": object{"untyped": []string{"envoy.lb"}}}}
			if c.shadow {
				mode["request_body_mode"], mode["response_body_mode"] = "STREAMED", "STREAMED"
				maps.Copy(processor, object{"observability_mode": true, "failure_mode_allow": true,
					"deferred_close_timeout": "1s", "response_attributes": []string{"upstream.address"}})
			}
			filters = append(filters, object{"name": "envoy.filters.http.ext_proc", "typed_config": typed(
				"envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor", processor)})
		}
		filters = append(filters, object{"name": "envoy.filters.http.router", "typed_config": typed(
			"envoy.extensions.filters.http.router.v3.Router", object{})})
		listeners = append(listeners, object{"name": fmt.Sprintf("listener-%d", i), "address": address(c.listen),
			"per_connection_buffer_limit_bytes": 1 << 20,
			"filter_chains": []object{
				{"filters": []object{{"name": "envoy.filters.network.http_connection_manager", "typed_config": typed(
					"envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager", object{
						"stat_prefix": "bench", "codec_type": "AUTO", "http_filters": filters,
						"route_config": object{
							"virtual_hosts": []object{{"name": "all", "domains": []string{"*"}, "routes": []object{{
								"match": object{
									"prefix": "/",
								}, "route": object{"cluster": "upstream", "timeout": "0s"}}}}},
						}})}}},
			}})
	}
	return json.MarshalIndent(object{"static_resources": object{"listeners": listeners, "clusters": clusters}}, "", " ")
}
