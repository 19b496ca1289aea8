package feed

import (
	"fmt"
	"net"
	"strconv"

	"github.com/spf13/pflag"

	"kvepp/internal/flags"
)

// AddFlags declares the flags, and sets what has none.
func (c *Config) AddFlags(fs *pflag.FlagSet) {
	c.Threads = 4 // of the others, so that a flood of events leaves processors for requests
	fs.StringVar(&c.CallbackAddress, "dynamo-callback-address", ":0",
		"`HOST:PORT` where Dynamo's workers without kvEvents connect to kvepp and tell which blocks they hold. "+
			"Without a host: the address from which kvepp reaches the worker; port 0: any free one. kvepp listens at "+
			"PORT of all interfaces once it knows such a worker, with TLS if DYN_TCP_TLS_CERT_PATH is set")
	fs.StringVar(&c.NATSServer, "nats-server", "nats://localhost:4222",
		"`URL` of the server of Dynamo's event plane over NATS; may contain user:password@")
	flags.Inherit(fs, "nats-server", "NATS_SERVER")
}

// Validate returns an error if a setting is invalid.
func (c *Config) Validate() error {
	if _, port, err := net.SplitHostPort(c.CallbackAddress); err != nil {
		return fmt.Errorf("--dynamo-callback-address: %w", err)
	} else if _, err := strconv.ParseUint(port, 10, 16); err != nil {
		return fmt.Errorf("--dynamo-callback-address %q: the port must be a number up to 65535", c.CallbackAddress)
	}
	return nil
}
