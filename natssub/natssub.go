// Package natssub subscribes to subjects of a NATS server over one connection.
//
// It owns the connection, which is made again whenever it ends, and the bound of what waits to be read. It never looks
// into messages. NATS forgets: what a subscriber was too slow for, or not connected for, is gone, and only what
// messages themselves say can show it.
//
// Concurrency: everything is safe from any goroutine.
package natssub

import (
	"fmt"
	"log/slog"
	"net/url"
	"strings"

	"github.com/nats-io/nats.go"

	"kvepp/internal/loglimit"
)

// Config says what to connect to, and who is told.
type Config struct {
	// Server is the server's URL, such as nats://host:4222, or several with commas between. They may hold a user and a
	// password.
	Server string
	// Purpose says in logs what is lost while there is no connection.
	Purpose string
	// Changed is told when there is a connection and when there is none any more, from one goroutine. nil: nobody is.
	Changed func(connected bool)
	Log     *slog.Logger
}

// Conn is a connection, or the attempt to make one.
type Conn struct {
	conn   *nats.Conn
	cfg    Config
	errors loglimit.Limiter // of lines about what NATS reports, such as a subscriber that is too slow
	silent bool             // that there is no connection was said; of package nats's one goroutine for callbacks
}

// Connect begins to connect. The server need not be there: it is tried until Close, every two seconds. An error says
// that Server cannot be understood.
func Connect(cfg Config) (*Conn, error) {
	if cfg.Changed == nil {
		cfg.Changed = func(bool) {}
	}
	c := &Conn{cfg: cfg}
	there := func(*nats.Conn) {
		c.silent = false
		cfg.Changed(true)
	}
	conn, err := nats.Connect(cfg.Server, nats.Name("kvepp"), nats.RetryOnFailedConnect(true), nats.MaxReconnects(-1),
		nats.ConnectHandler(there),
		nats.ReconnectHandler(there),
		nats.ReconnectErrHandler(func(_ *nats.Conn, err error) {
			c.missing("NATS cannot be reached; it is tried again and again. --nats-server says where it is", err)
		}),
		nats.DisconnectErrHandler(func(conn *nats.Conn, err error) {
			if !conn.IsClosed() {
				c.missing("the connection to NATS ended; it is made again", err)
			}
			cfg.Changed(false)
		}),
		nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) {
			c.errors.Log(
				cfg.Log,
				slog.LevelWarn,
				"NATS reports an error",
				"for",
				cfg.Purpose,
				"server",
				redacted(cfg.Server),
				"error",
				err,
			)
		}))
	if err != nil {
		return nil, fmt.Errorf("natssub: NATS server %s: %w; correct --nats-server", redacted(cfg.Server), err)
	}
	c.conn = conn
	return c, nil
}

// missing says, once in each time without a connection, that there is none.
func (c *Conn) missing(what string, err error) {
	if !c.silent {
		c.silent = true
		c.cfg.Log.Warn(what, "for", c.cfg.Purpose, "server", redacted(c.cfg.Server), "error", err)
	}
}

// redacted is the server, or the several of them, without passwords.
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

// Close ends the connection and all subscriptions. A message that is being given out may still be when it returns.
func (c *Conn) Close() { c.conn.Close() }

// Subscription is one to a subject.
type Subscription struct {
	subscription *nats.Subscription
}

// Subscribe gives each message on a subject to message, one after the other and from the connection's next one on,
// until Close. At most pending bytes wait for it; what comes beyond is lost.
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

// Close ends the subscription. A message that is being given out may still be when it returns.
func (s *Subscription) Close() {
	_ = s.subscription.Unsubscribe() // fails only on a connection that was closed
}
