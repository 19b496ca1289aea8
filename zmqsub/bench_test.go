package zmqsub

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"

	zmq "github.com/pebbe/zmq4"
)

// publishFor is the environment variable that makes the test binary a publisher; see publishUntilEOF for its value.
const publishFor = "ZMQSUB_TEST_PUBLISH"

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

// publishUntilEOF reads from spec the numbers SOCKETS COUNT SIZE HWM. It binds SOCKETS publishers with a high-water
// mark HWM (0: none), prints their endpoints, waits for a subscriber to each, and sends COUNT messages of SIZE bytes
// from each. For each line on standard input it sends one more. It ends with standard input.
func publishUntilEOF(spec string) error {
	var sockets, count, size, hwm int
	if _, err := fmt.Sscan(spec, &sockets, &count, &size, &hwm); err != nil {
		return err
	}
	if err := zmq.SetMaxSockets(sockets + 10); err != nil {
		return err
	}
	publishers := make([]*zmq.Socket, sockets)
	for i := range publishers {
		socket, err := zmq.NewSocket(zmq.XPUB)
		if err != nil {
			return err
		}
		if err := errors.Join(socket.SetLinger(0), socket.SetSndhwm(hwm),
			socket.Bind("tcp://127.0.0.1:*")); err != nil {
			return err
		}
		endpoint, err := socket.GetLastEndpoint()
		if err != nil {
			return err
		}
		fmt.Println(endpoint)
		publishers[i] = socket
	}
	for _, socket := range publishers {
		if _, err := socket.RecvBytes(0); err != nil {
			return err
		}
	}
	payload := make([]byte, size)
	send := func(seq uint64) error {
		for _, socket := range publishers {
			if _, err := socket.SendMessage("", binary.BigEndian.AppendUint64(nil, seq), payload); err != nil {
				return err
			}
		}
		return nil
	}
	for seq := range uint64(count) {
		if err := send(seq); err != nil {
			return err
		}
	}
	fmt.Println("sent")
	lines := bufio.NewScanner(os.Stdin)
	for seq := uint64(count); lines.Scan(); seq++ {
		if err := send(seq); err != nil {
			return err
		}
	}
	return lines.Err()
}

// publishers starts a process that runs publishUntilEOF, and returns its endpoints, input and output. The process ends
// with the test.
func publishers(t testing.TB, sockets, count, size, hwm int) (endpoints []string, in io.Writer, out *bufio.Scanner) {
	t.Helper()
	process := exec.Command(os.Args[0])
	process.Env = append(os.Environ(), fmt.Sprintf("%s=%d %d %d %d", publishFor, sockets, count, size, hwm))
	process.Stderr = os.Stderr
	stdin, err := process.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := process.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := process.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		stdin.Close()
		process.Wait()
	})
	out = bufio.NewScanner(stdout)
	for range sockets {
		if !out.Scan() {
			t.Fatalf("the publishers ended: %v", out.Err())
		}
		endpoints = append(endpoints, out.Text())
	}
	return endpoints, stdin, out
}

// BenchmarkReceive measures the CPU time of receiving, with system calls and libzmq's threads; the publisher is another
// process. 4672 bytes are one prefill of 64 blocks of 16 tokens, as vLLM announces it. "binding" is the simplest loop
// over the common Go binding of libzmq, for comparison.
func BenchmarkReceive(b *testing.B) {
	for _, size := range []int{100, 4672} {
		b.Run(fmt.Sprintf("bytes=%d", size), func(b *testing.B) {
			endpoints, _, _ := publishers(b, 1, b.N, size, 0)
			h := newHub(b)
			c := &counter{until: uint64(b.N), done: make(chan struct{})}
			b.ReportAllocs()
			b.ResetTimer()
			before := cpuTime(b)
			if _, err := h.Subscribe(Config{Endpoint: endpoints[0]}, c); err != nil {
				b.Fatal(err)
			}
			<-c.done
			b.ReportMetric(float64((cpuTime(b)-before).Nanoseconds())/float64(b.N), "cpu-ns/message")
			if c.wrong != "" {
				b.Error(c.wrong)
			}
		})
		b.Run(fmt.Sprintf("binding/bytes=%d", size), func(b *testing.B) {
			endpoints, _, _ := publishers(b, 1, b.N, size, 0)
			b.ReportAllocs()
			b.ResetTimer()
			before := cpuTime(b)
			socket, err := zmq.NewSocket(zmq.SUB)
			if err != nil {
				b.Fatal(err)
			}
			defer socket.Close()
			if err := errors.Join(socket.SetRcvhwm(100_000), socket.SetSubscribe(""),
				socket.Connect(endpoints[0])); err != nil {
				b.Fatal(err)
			}
			for range b.N {
				if _, err := socket.RecvMessageBytes(0); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64((cpuTime(b)-before).Nanoseconds())/float64(b.N), "cpu-ns/message")
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
	wrong       string // the first report other than a message in order
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
func (c *counter) Replayed(Replay, int)     {}
func (c *counter) Malformed(err error)      { c.wrong = err.Error() }
func (c *counter) Cut(err error)            { c.wrong = err.Error() }
func (c *counter) Connected()               {}
func (c *counter) Disconnected()            {}
