package main

import (
	"errors"
	"fmt"

	"github.com/spf13/pflag"
)

// tracking is by which hash Dynamo's routers name the blocks of bookings that they tell each other. kvepp tells nobody,
// and has Dynamo's default.
type tracking struct{ hash, keyFile, keyID string }

const publicTracking = "public-xxh3-v1"

func (t *tracking) add(f *pflag.FlagSet) {
	f.StringVar(
		&t.hash,
		"router-tracking-hash",
		publicTracking,
		"`HASH` by which bookings know blocks; no other than the default",
	)
	f.StringVar(&t.keyFile, "router-tracking-key-file", "", "`FILE`; refused: belongs to another hash")
	f.StringVar(&t.keyID, "router-tracking-key-id", "", "`ID`; refused: belongs to another hash")
}

func (t *tracking) check() error {
	switch {
	case t.hash != publicTracking:
		return fmt.Errorf(
			"--router-tracking-hash %q: must be %s; kvepp tells no other process what it booked, so that nothing is "+
				"to be hidden by a key",
			t.hash,
			publicTracking,
		)
	case t.keyFile != "" || t.keyID != "":
		return errors.New(
			"--router-tracking-key-file and --router-tracking-key-id: kvepp knows no tracking hash with a key; leave " +
				"them out",
		)
	}
	return nil
}
