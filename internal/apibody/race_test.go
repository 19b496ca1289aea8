//go:build race

package apibody

// slowerBuild is about how many times slower this build runs.
const slowerBuild = 12
