//go:build race

package jinja

// slower is about how many times slower this build runs.
const slower = 12
