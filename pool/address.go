package pool

import (
	"fmt"
	"net"
	"strconv"
	"strings"
)

// offsetPort adds n to the port of a tcp://host:port address that CheckTCP accepts. An empty address stays empty.
// Source: vLLM's rule for data-parallel ranks, "port + rank".
func offsetPort(address string, n uint32) string {
	if address == "" || n == 0 {
		return address
	}
	i := strings.LastIndexByte(address, ':')
	port, err := strconv.ParseUint(address[i+1:], 10, 16)
	if err != nil {
		return address
	}
	return address[:i+1] + strconv.FormatUint(port+uint64(n), 10)
}

// CheckTCP returns an error if address is not tcp://HOST:PORT, or if n consecutive ports from PORT exceed 65535.
func CheckTCP(address string, n uint32) error {
	rest, ok := strings.CutPrefix(address, "tcp://")
	if !ok {
		return fmt.Errorf("%.200q must look like tcp://HOST:PORT", address)
	}
	return checkHostPort(rest, n)
}

// CheckHostPort returns an error if address is not HOST:PORT.
func CheckHostPort(address string) error { return checkHostPort(address, 1) }

// checkHostPort returns an error if address is not HOST:PORT, or if n consecutive ports from PORT exceed 65535.
func checkHostPort(address string, n uint32) error {
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return fmt.Errorf("%.200q must look like HOST:PORT ([HOST]:PORT for IPv6)", address)
	}
	if host == "" || host == "*" {
		return fmt.Errorf("%.200q has no host: give the address that kvepp and Envoy connect to", address)
	}
	if err := checkHost(host); err != nil {
		return err
	}
	p, err := strconv.ParseUint(port, 10, 16)
	if err != nil || p == 0 {
		return fmt.Errorf("%.200q: the port must be a number from 1 to 65535", address)
	}
	if p+uint64(max(n, 1))-1 > 65535 {
		return fmt.Errorf("%.200q: %d ranks need ports up to %d", address, n, p+uint64(n)-1)
	}
	return nil
}
