//go:build race

package chattemplate

// slower is about how much longer everything takes in this build.
const slower = 12
