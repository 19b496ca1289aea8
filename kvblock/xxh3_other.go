//go:build !amd64

package kvblock

func hashFourStripes(dst []LocalHash, tokens []Token, s *secret) { s.hashFourStripes(dst, tokens) }
