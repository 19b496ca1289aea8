package main

import (
	"encoding/binary"
	"flag"
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	zmq "github.com/pebbe/zmq4"

	"kvepp/test/harness/process"
)

var thousand = flag.Int("pods", 1000, "how many pods BenchmarkThousandPods has; 1,000 need `ulimit -n 33000`")

// BenchmarkThousandPods measures a kvepp that subscribes to the events of 1,000 endpoints with eight ranks each: its
// memory once it is connected to all, its CPU time while they are silent, and its memory once each has announced 512
// blocks of its own. It has the limits of a container of 2 GiB. Run it with -benchtime 1x only.
func BenchmarkThousandPods(b *testing.B) {
	const ranks, messages, length, block = 8, 8, 64, 16
	pods := *thousand
	first, err := process.Ports(ranks)
	if err != nil {
		b.Fatal(err)
	}
	var sockets []*zmq.Socket
	for r := range ranks {
		socket, err := zmq.NewSocket(zmq.PUB)
		if err != nil {
			b.Fatal(err)
		}
		socket.SetLinger(0)
		socket.SetSndhwm(0)
		if err := socket.Bind(fmt.Sprintf("tcp://127.0.0.1:%d", first+r)); err != nil {
			b.Fatal(err)
		}
		defer socket.Close()
		sockets = append(sockets, socket)
	}
	// Rank r of all pods publishes on socket r, under the topic of its pod.
	var endpoints strings.Builder
	endpoints.WriteString("endpoints:\n")
	for p := range pods {
		fmt.Fprintf(
			&endpoints,
			"- {name: p%d, address: '10.0.%d.%d:8000', dataParallelSize: %d, blockSize: %d, kvEvents: "+
				"'tcp://127.0.0.1:%d', kvTopic: 'p%04d.'}\n",
			p,
			p/250,
			p%250+1,
			ranks,
			block,
			first,
			p,
		)
	}
	for b.Loop() {
		r := reserve(b)
		r.env = []string{"GOMEMLIMIT=1792MiB"}
		r.writeEndpoints(endpoints.String())
		r.start()
		r.until("kvepp to be connected", 10*time.Minute, func() error {
			return r.checkMetric(`kvepp_subscriptions{state="connected"}`, pods*ranks)
		})
		connected := r.memory("VmRSS:")
		before, began := r.processorTime(), time.Now()
		<-time.After(5 * time.Second)
		b.ReportMetric((r.processorTime()-before).Seconds()/time.Since(began).Seconds(), "idle-cores")
		b.ReportMetric(float64(connected)/(1<<20), "connected-MiB")
		for rank, socket := range sockets {
			for p := range pods {
				for m := range messages {
					body := batch(uint64(((p*ranks+rank)*messages+m)*length), m > 0, length, block, rank)
					if _, err := socket.SendMessage(fmt.Sprintf("p%04d.", p),
						binary.BigEndian.AppendUint64(nil, uint64(m)), body); err != nil {
						b.Fatal(err)
					}
				}
			}
		}
		r.until(
			"all blocks to be in the index",
			10*time.Minute,
			func() error { return r.checkMetric("kvepp_index_blocks", pods*ranks*messages*length) },
		)
		index, err := r.metric("kvepp_index_bytes")
		if err != nil {
			b.Fatal(err)
		}
		b.ReportMetric(index/(1<<20), "index-MiB")
		b.ReportMetric(float64(r.memory("VmRSS:"))/(1<<20), "loaded-MiB")
		b.ReportMetric(float64(r.memory("VmHWM:"))/(1<<20), "most-MiB")
		<-time.After(70 * time.Second) // the runtime returns freed memory to the system once a minute
		b.ReportMetric(float64(r.memory("VmRSS:"))/(1<<20), "later-MiB")
		r.Kill()
	}
}

// metric returns the value of one metric of kvepp.
func (r *running) metric(name string) (float64, error) {
	text, err := r.metrics()
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(text) {
		if value, ok := strings.CutPrefix(line, name+" "); ok {
			return strconv.ParseFloat(strings.TrimSpace(value), 64)
		}
	}
	return 0, fmt.Errorf("no metric %s", name)
}

// checkMetric returns an error unless a metric has the value want.
func (r *running) checkMetric(name string, want int) error {
	got, err := r.metric(name)
	if err == nil && got != float64(want) {
		err = fmt.Errorf("%s is %v, want %d", name, got, want)
	}
	return err
}

// memory returns the value of a line of the process's status, in bytes.
func (r *running) memory(line string) int {
	r.t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", r.Pid()))
	if err != nil {
		r.t.Fatal(err)
	}
	_, after, _ := strings.Cut(string(text), line)
	kilobytes, _, _ := strings.Cut(after, "kB")
	n, err := strconv.Atoi(strings.TrimSpace(kilobytes))
	if err != nil {
		r.t.Fatal(err)
	}
	return n << 10
}

// processorTime returns the CPU time of all threads of the process.
func (r *running) processorTime() time.Duration {
	r.t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", r.Pid()))
	if err != nil {
		r.t.Fatal(err)
	}
	_, after, _ := strings.Cut(string(text), ") ") // the name may contain spaces
	fields := strings.Fields(after)
	ticks := 0
	for _, field := range fields[11:13] { // utime and stime; proc(5)
		n, err := strconv.Atoi(field)
		if err != nil {
			r.t.Fatal(err)
		}
		ticks += n
	}
	return time.Duration(ticks) * time.Second / 100
}

// batch returns a KV event message of vLLM. Its blocks are numbered from first, and each has tokens of its own. If
// parent is true, they follow block first-1.
func batch(first uint64, parent bool, blocks, size, rank int) []byte {
	u64 := func(b []byte, v uint64) []byte { return binary.BigEndian.AppendUint64(append(b, 0xcf), v) }
	list := func(b []byte, n int) []byte { return binary.BigEndian.AppendUint16(append(b, 0xdc), uint16(n)) }
	text := func(b []byte, s string) []byte { return append(append(b, 0xd9, byte(len(s))), s...) }
	const nothing = 0xc0
	b := append(list(nil, 3), 0xcb, 0x3f, 0xf8, 0, 0, 0, 0, 0, 0) // time, events, rank
	b = text(list(list(b, 1), 7), "BlockStored")
	b = list(b, blocks)
	for i := range blocks {
		b = u64(b, first+uint64(i)+1)
	}
	if parent {
		b = u64(b, first)
	} else {
		b = append(b, nothing)
	}
	b = list(b, blocks*size)
	for i := range blocks * size {
		b = binary.BigEndian.AppendUint32(append(b, 0xce), uint32(first*31+uint64(i))&0x1ffff)
	}
	b = append(b, byte(size), nothing)
	return append(text(b, "GPU"), byte(rank))
}
