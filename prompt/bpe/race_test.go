//go:build race

package bpe

// slowerBuild is about how much longer everything takes in this build.
const slowerBuild = 12
