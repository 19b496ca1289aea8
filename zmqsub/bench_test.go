package zmqsub

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	zmq "github.com/pebbe/zmq4"
)

// publishFor, in the environment, makes the test binary a publisher: "COUNT SIZE".
const publishFor = "ZMQSUB_BENCHMARK_PUBLISH"

func TestMain(m *testing.M) {
	if spec := os.Getenv(publishFor); spec != "" {
		if err := publishUntilEOF(spec); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// publishUntilEOF tells its endpoint on standard output, sends to the first subscriber, and ends with standard input.
func publishUntilEOF(spec string) error {
	var count, size int
	if _, err := fmt.Sscan(spec, &count, &size); err != nil {
		return err
	}
	socket, err := zmq.NewSocket(zmq.XPUB)
	if err != nil {
		return err
	}
	if err := errors.Join(socket.SetLinger(0), socket.SetSndhwm(0), socket.Bind("tcp://127.0.0.1:*")); err != nil {
		return err
	}
	endpoint, err := socket.GetLastEndpoint()
	if err != nil {
		return err
	}
	fmt.Println(endpoint)
	if _, err := socket.RecvBytes(0); err != nil {
		return err
	}
	payload := make([]byte, size)
	for seq := range uint64(count) {
		if _, err := socket.SendMessage("", binary.BigEndian.AppendUint64(nil, seq), payload); err != nil {
			return err
		}
	}
	_, err = io.Copy(io.Discard, os.Stdin)
	return errors.Join(err, socket.Close())
}

// The CPU that receiving costs this process, system calls and libzmq's threads included; the publisher is another process.
// 4672 bytes are one prefill of 64 blocks of 16 tokens, as vLLM announces it.
func BenchmarkReceive(b *testing.B) {
	for _, size := range []int{100, 4672} {
		b.Run(fmt.Sprintf("bytes=%d", size), func(b *testing.B) {
			publisher := exec.Command(os.Args[0])
			publisher.Env = append(os.Environ(), fmt.Sprintf("%s=%d %d", publishFor, b.N, size))
			publisher.Stderr = os.Stderr
			stdin, err := publisher.StdinPipe()
			if err != nil {
				b.Fatal(err)
			}
			stdout, err := publisher.StdoutPipe()
			if err != nil {
				b.Fatal(err)
			}
			if err := publisher.Start(); err != nil {
				b.Fatal(err)
			}
			defer publisher.Wait()
			defer stdin.Close()
			endpoint, err := bufio.NewReader(stdout).ReadString('\n')
			if err != nil {
				b.Fatal(err)
			}
			h := newHub(b)
			c := &counter{until: uint64(b.N), done: make(chan struct{})}
			b.ReportAllocs()
			b.ResetTimer()
			before := cpuTime(b)
			if _, err := h.Subscribe(Config{Endpoint: strings.TrimSpace(endpoint)}, c); err != nil {
				b.Fatal(err)
			}
			<-c.done
			b.ReportMetric(float64((cpuTime(b)-before).Nanoseconds())/float64(b.N), "cpu-ns/message")
			if c.wrong != "" {
				b.Error(c.wrong)
			}
		})
	}
}

func cpuTime(b *testing.B) time.Duration {
	var usage syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &usage); err != nil {
		b.Fatal(err)
	}
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}

// counter is a Handler that waits for a number of messages.
type counter struct {
	next, until uint64
	done        chan struct{}
	wrong       string // what came instead of messages in order
}

func (c *counter) Message(seq uint64, _, _ []byte) {
	if seq != c.next {
		c.wrong = fmt.Sprintf("message %d, want %d", seq, c.next)
	}
	if c.next++; c.next == c.until {
		close(c.done)
	}
}

func (c *counter) Gap(expected, got uint64) { c.wrong = fmt.Sprintf("gap %d-%d", expected, got) }
func (c *counter) Restart()                 { c.wrong = "restart" }
func (c *counter) Malformed(err error)      { c.wrong = err.Error() }
func (c *counter) Connected()               {}
func (c *counter) Disconnected()            {}
