// Package natssub subscribes to subjects of a NATS server over one connection.
//
// It owns the connection, which it restores whenever it ends, and bounds the messages that wait to be read. It never
// looks into messages. NATS does not store messages: a message sent while a subscriber is too slow or not connected is
// lost, and only the content of later messages can reveal the loss.
//
// All functions and methods are safe for concurrent use.
package natssub

import (
	"fmt"
	"log/slog"
	"net/url"
	"strings"

	"github.com/nats-io/nats.go"

	"kvepp/internal/loglimit"
	"kvepp/internal/useragent"
)

// Config configures a connection.
type Config struct {
	// Server is the server's URL, such as nats://host:4222, or several URLs separated by commas. A URL may contain a
	// user and a password.
	Server string
	// Purpose names in log lines what is missing while there is no connection.
	Purpose string
	// Changed is called when the connection opens and when it ends, from one goroutine. May be nil.
	Changed func(connected bool)
	Log     *slog.Logger
}

// Conn is a connection, or repeated attempts to open one.
type Conn struct {
	conn         *nats.Conn
	cfg          Config
	errors       loglimit.Limiter // limits lines about errors that NATS reports, such as a slow consumer
	outageLogged bool             // the current outage was logged; used only by package nats's callback goroutine
}

// Connect starts to connect, under kvepp's name and version, which the server lists beside each connection. The server
// may be absent: Connect returns at once, and the connection is retried every two seconds until Close. An error means
// that Server is not a valid URL.
func Connect(cfg Config) (*Conn, error) {
	if cfg.Changed == nil {
		cfg.Changed = func(bool) {}
	}
	c := &Conn{cfg: cfg}
	onConnect := func(*nats.Conn) {
		c.outageLogged = false
		cfg.Changed(true)
	}
	conn, err := nats.Connect(cfg.Server, nats.Name(useragent.Text()), nats.RetryOnFailedConnect(true),
		nats.MaxReconnects(-1),
		nats.ConnectHandler(onConnect),
		nats.ReconnectHandler(onConnect),
		nats.ReconnectErrHandler(func(_ *nats.Conn, err error) {
			c.logOutage("NATS is unreachable; kvepp keeps trying; check --nats-server", err)
		}),
		nats.DisconnectErrHandler(func(conn *nats.Conn, err error) {
			if !conn.IsClosed() {
				c.logOutage("connection to NATS ended; reconnecting", err)
			}
			cfg.Changed(false)
		}),
		nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) {
			c.errors.Log(cfg.Log, slog.LevelWarn, "NATS reported an error",
				"purpose", cfg.Purpose, "server", redacted(cfg.Server), "error", err)
		}))
	if err != nil {
		return nil, fmt.Errorf("natssub: NATS server %s: %w; correct --nats-server", redacted(cfg.Server), err)
	}
	c.conn = conn
	return c, nil
}

// logOutage logs once per outage that there is no connection.
func (c *Conn) logOutage(what string, err error) {
	if !c.outageLogged {
		c.outageLogged = true
		c.cfg.Log.Warn(what, "purpose", c.cfg.Purpose, "server", redacted(c.cfg.Server), "error", err)
	}
}

// redacted returns the server URL or URLs without passwords.
func redacted(server string) string {
	servers := strings.Split(server, ",")
	for i, one := range servers {
		servers[i] = "(not a URL)"
		if u, err := url.Parse(one); err == nil {
			servers[i] = u.Redacted()
		}
	}
	return strings.Join(servers, ",")
}

// Connected reports whether there is a connection now.
func (c *Conn) Connected() bool { return c.conn.IsConnected() }

// Close ends the connection and all subscriptions. A callback may still be running when it returns.
func (c *Conn) Close() { c.conn.Close() }

// Subscription is a subscription to one subject.
type Subscription struct {
	subscription *nats.Subscription
}

// Subscribe calls message for each message on a subject, one at a time, until Close. It starts as soon as there is a
// connection. At most pending bytes of messages wait; further messages are lost.
func (c *Conn) Subscribe(subject string, pending int, message func(data []byte)) (*Subscription, error) {
	s, err := c.conn.Subscribe(subject, func(m *nats.Msg) { message(m.Data) })
	if err == nil {
		err = s.SetPendingLimits(-1, pending)
	}
	if err != nil {
		return nil, fmt.Errorf("natssub: subject %q: %w", subject, err)
	}
	return &Subscription{s}, nil
}

// Close ends the subscription. A callback may still be running when it returns.
func (s *Subscription) Close() {
	_ = s.subscription.Unsubscribe() // fails only on a closed connection
}
