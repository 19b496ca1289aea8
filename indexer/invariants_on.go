//go:build invariants

package indexer

// invariants turns on the structural checks of each tier after changes (check.go). They slow down every write.
const invariants = true

// checkState decides when a tier is checked. tier.mu guards it.
type checkState struct{ changes int }

// blocksPerChange bounds the cost of the checks: a tier of n blocks is checked after every n/blocksPerChange changes.
const blocksPerChange = 64

// due counts a change of a tier with this number of blocks, and reports whether to check the tier now.
func (c *checkState) due(blocks int) bool {
	if c.changes++; c.changes*blocksPerChange < blocks {
		return false
	}
	c.changes = 0
	return true
}
