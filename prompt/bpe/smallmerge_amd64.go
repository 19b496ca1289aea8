package bpe

// stepMerges does one merge in each of count pieces, which are the elements of group with the indexes in running. It
// keeps the indexes of those that merged in running, in their order, and returns their number. It puts the indexes of
// the others, which have no merge left, into done. It prefetches what the next call looks up.
//
//go:noescape
func stepMerges(t *mergeTable, group *[maxGroup]smallMerge, running, done *[maxGroup]uint8, count int) int
