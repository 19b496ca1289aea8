package kvblock
import "testing"
func BenchmarkZZ(b *testing.B) {
	p := decodeSteps(32, 16)
	var batch Batch
	var ops []Operation
	n := NewNormalizer(16)
	b.Run("decode", func(b *testing.B){ for b.Loop() { if DecodeBatch(p,&batch)!=nil {b.Fatal()} } })
	b.Run("normalize", func(b *testing.B){ for b.Loop() { ops = n.Normalize(&batch, ops[:0]) } })
}
