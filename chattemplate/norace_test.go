//go:build !race

package chattemplate

// slower is about how many times slower this build runs.
const slower = 1
