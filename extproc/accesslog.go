package extproc

import (
	"errors"
	"io"

	accesslogdata "github.com/envoyproxy/go-control-plane/envoy/data/accesslog/v3"
	accesslogv3 "github.com/envoyproxy/go-control-plane/envoy/service/accesslog/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"kvepp/router"
	"kvepp/router/eject"
)

// AccessLog implements envoy.service.accesslog.v3.AccessLogService. An ext_proc stream ends in the same way whether the
// client or the endpoint aborted a response; the proxy's access log says which of them did. Its entries have the token
// that kvepp put into the request's metadata. A proxy that sends such a log says so in the metadata of its ext_proc
// streams: see [logsResponses].
type AccessLog struct {
	accesslogv3.UnimplementedAccessLogServiceServer
	router   *router.Router
	stopping chan struct{} // closed by Stop
}

// logsResponses is the metadata key of an ext_proc stream by which a proxy says that it sends its access log to kvepp.
const logsResponses = "x-kvepp-access-log"

// NewAccessLog returns a service that reports aborted responses to r.
func NewAccessLog(r *router.Router) *AccessLog {
	return &AccessLog{router: r, stopping: make(chan struct{})}
}

// Stop ends all streams. Call it once, before the server waits for its streams to end: proxies never end these.
func (l *AccessLog) Stop() { close(l.stopping) }

// StreamAccessLogs reads entries until the proxy ends the stream, or Stop is called. It sends nothing before that.
func (l *AccessLog) StreamAccessLogs(proxy accesslogv3.AccessLogService_StreamAccessLogsServer) error {
	ended := make(chan error, 1)
	go func() { ended <- l.read(proxy) }() // it ends with the stream, at the latest when this function returns
	select {
	case err := <-ended:
		return err
	case <-l.stopping:
		return nil
	}
}

func (l *AccessLog) read(proxy accesslogv3.AccessLogService_StreamAccessLogsServer) error {
	for {
		message, err := proxy.Recv()
		switch {
		case errors.Is(err, io.EOF):
			return proxy.SendAndClose(&accesslogv3.StreamAccessLogsResponse{})
		case status.Code(err) == codes.Canceled:
			return nil
		case err != nil:
			return err
		}
		for _, entry := range message.GetHttpLogs().GetLogEntry() {
			common := entry.GetCommonProperties()
			token := common.GetMetadata().GetFilterMetadata()[endpointNamespace].GetFields()[tokenKey].GetStringValue()
			if token != "" {
				l.router.BrokenOff(token, brokenBy(common.GetResponseFlags()))
			}
		}
	}
}

// brokenBy returns how the endpoint aborted its response; empty: it did not, the client closed the connection.
func brokenBy(f *accesslogdata.ResponseFlags) eject.Cause {
	switch {
	case f.GetUpstreamConnectionTermination(), f.GetUpstreamRemoteReset(), f.GetUpstreamProtocolError():
		return eject.Reset
	case f.GetUpstreamConnectionFailure():
		return eject.Refused
	case f.GetUpstreamRequestTimeout():
		return eject.Timeout
	}
	return ""
}
