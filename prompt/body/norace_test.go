//go:build !race

package body

// slowerBuild is about how many times slower this build runs.
const slowerBuild = 1
