package process

import (
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
)

// Ports does not return a port again while others are left, not even to another process, and returns no busy port.
func TestPorts(t *testing.T) {
	if os.Getenv("KVEPP_PORTS_OF_ANOTHER") != "" {
		first, err := Ports(5)
		if err != nil {
			t.Fatal(err)
		}
		os.Stdout.WriteString("ports from " + strconv.Itoa(first) + "\n")
		return
	}
	given := map[int]bool{}
	take := func(n int) int {
		t.Helper()
		first, err := Ports(n)
		if err != nil {
			t.Fatal(err)
		}
		for p := first; p < first+n; p++ {
			if given[p] {
				t.Fatalf("port %d was returned twice", p)
			}
			given[p] = true
		}
		return first
	}
	last := take(1)
	taken, err := net.Listen("tcp", "127.0.0.1:"+strconv.Itoa(last+2))
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	if first := take(3); first != last+3 {
		t.Errorf("three ports from %d after %d, while %d is in use", first, last, last+2)
	}
	for range 20 {
		take(17)
	}

	another := exec.Command(os.Args[0], "-test.run=^TestPorts$", "-test.v")
	another.Env = append(os.Environ(), "KVEPP_PORTS_OF_ANOTHER=1")
	out, err := another.Output()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	_, after, _ := strings.Cut(string(out), "ports from ")
	line, _, _ := strings.Cut(after, "\n")
	first, err := strconv.Atoi(line)
	if err != nil {
		t.Fatalf("%v in %s", err, out)
	}
	if mine := ports.first; first >= mine && first < mine+portBlock {
		t.Errorf("another process has ports from %d, which is in this one's block from %d", first, mine)
	}

	for i := range 3 { // the whole block, several times
		for range portBlock / 100 {
			if _, err := Ports(99); err != nil {
				t.Fatalf("turn %d: %v", i, err)
			}
		}
	}
	if _, err := Ports(portBlock); err == nil {
		t.Error("no error for more ports than a block has")
	}
}
