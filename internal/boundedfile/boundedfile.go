// Package boundedfile reads files of operators, which may be of any size: a wrong path, or a file that grows.
package boundedfile

import (
	"bytes"
	"fmt"
	"io"
	"os"
)

// Read reads a file of at most most bytes. A larger one is an error before it takes memory.
func Read(path string, most int64) ([]byte, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	info, err := file.Stat()
	if err != nil {
		return nil, err
	}
	tooLarge := fmt.Errorf("%s: larger than %d bytes", path, most)
	if info.Size() > most {
		return nil, tooLarge
	}
	raw := bytes.NewBuffer(make([]byte, 0, info.Size()+bytes.MinRead)) // ReadFrom does not grow it
	if _, err := raw.ReadFrom(io.LimitReader(file, most+1)); err != nil {
		return nil, err
	}
	if int64(raw.Len()) > most { // no size is known before, or it has grown
		return nil, tooLarge
	}
	return raw.Bytes(), nil
}
