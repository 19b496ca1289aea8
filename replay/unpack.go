package replay

import (
	"compress/gzip"
	"fmt"
	"io"
)

// A gzip file may unpack to this many bytes in any case, and beyond that to maxRatio times its size. Traces of long
// shared prompts reach a ratio of about 30; gzip's greatest is 1032.
const (
	freeUnpacked = 64 << 20
	maxRatio     = 200
)

// counter counts the bytes that are read.
type counter struct {
	from io.Reader
	n    int64
}

func (c *counter) Read(p []byte) (int, error) {
	n, err := c.from.Read(p)
	c.n += int64(n)
	return n, err
}

// unpacker unpacks gzip data. It refuses data that was made to unpack to much more than a trace does.
type unpacker struct {
	packed   *counter
	gzip     *gzip.Reader
	unpacked int64
}

func (u *unpacker) Read(p []byte) (int, error) {
	n, err := u.gzip.Read(p)
	u.unpacked += int64(n)
	if u.unpacked > freeUnpacked && u.unpacked/maxRatio > u.packed.n {
		return 0, fmt.Errorf("%d bytes unpack to more than %d bytes: is this a trace? If it is, unpack the file first",
			u.packed.n, u.unpacked)
	}
	return n, err
}
