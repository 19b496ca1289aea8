//go:build !race

package zmqsub

// raceFactor is how much more memory than an ordinary build a test may use in this build.
const raceFactor = 1
