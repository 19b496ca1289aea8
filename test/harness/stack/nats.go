package stack

import (
	"context"
	"fmt"
	"net"
	"path/filepath"
	"strconv"
	"strings"
)

func (s *Stack) natsURL() string { return fmt.Sprintf("nats://127.0.0.1:%d", s.natsPort) }

// NATSClients returns the names of the NATS server's clients, as its monitoring lists them.
func (s *Stack) NATSClients(ctx context.Context) (names []string, err error) {
	var page struct {
		Connections []struct {
			Name string `json:"name"`
		} `json:"connections"`
	}
	err = getJSON(ctx, fmt.Sprintf("http://127.0.0.1:%d/connz", s.natsPage), &page)
	for _, c := range page.Connections {
		names = append(names, c.Name)
	}
	return names, err
}

// startNATS starts the NATS server and waits until it listens.
func (s *Stack) startNATS(ctx context.Context) (err error) {
	s.nats, err = s.spawn(
		"nats-server",
		nil,
		filepath.Join(s.cfg.Tools, "bin/nats-server"),
		"-a",
		"127.0.0.1",
		"-p",
		strconv.Itoa(s.natsPort),
		"-m",
		strconv.Itoa(s.natsPage),
	)
	if err != nil {
		return err
	}
	return s.up(ctx, "the NATS server", func() error {
		conn, err := net.Dial("tcp", strings.TrimPrefix(s.natsURL(), "nats://"))
		if err == nil {
			conn.Close()
		}
		return err
	}, s.nats)
}

// RestartNATS kills the NATS server, calls meanwhile, and starts it again.
func (s *Stack) RestartNATS(ctx context.Context, meanwhile func()) error {
	s.nats.Kill()
	meanwhile()
	return s.startNATS(ctx)
}
