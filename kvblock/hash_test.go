package kvblock

import (
	"slices"
	"testing"
)

func countingTokens(from, to Token) []Token {
	var t []Token
	for ; from <= to; from++ {
		t = append(t, from)
	}
	return t
}

// longTokens is the token list of vectors V7 and V7b.
func longTokens() []Token {
	t := make([]Token, 1024)
	for i := range t {
		t[i] = Token(uint32(i)*2654435761) % 151936
	}
	return t
}

var (
	baseLocal = []LocalHash{14643705804678351452, 16777012769546811212, 483935686894639516}
	baseSeq   = []SequenceHash{14643705804678351452, 4945711292740353085, 12583592247330656132}
)

// The vectors were computed with the crate dynamo-kv-router 1.6.1.
var hashVectors = []struct {
	name   string
	tokens []Token
	o      HashOptions
	local  []LocalHash
	seq    []SequenceHash
}{
	{"V1 base", countingTokens(1, 12), HashOptions{BlockSize: 4}, baseLocal, baseSeq},
	{"V2 lora", countingTokens(1, 12), HashOptions{BlockSize: 4, LoRAName: "my-lora"},
		[]LocalHash{15671544057904749233, 7919241211032067838, 6437396758604329923},
		[]SequenceHash{15671544057904749233, 15486599009994050725, 8291072227036031577}},
	{"V3 empty lora", countingTokens(1, 12), HashOptions{BlockSize: 4, LoRAName: ""}, baseLocal, baseSeq},
	{"V4 namespace", countingTokens(1, 12), HashOptions{BlockSize: 4, CacheNamespace: "tenant-a"},
		[]LocalHash{5738685477468498325, 11202231085456067787, 9318114775459440904},
		[]SequenceHash{5738685477468498325, 1076233986426276607, 14251413665512820044}},
	{
		"V5 lora and namespace",
		countingTokens(1, 12),
		HashOptions{BlockSize: 4, LoRAName: "my-lora", CacheNamespace: "tenant-a"},
		[]LocalHash{6157910915076630503, 3256431856703716508, 746293535497476961},
		[]SequenceHash{6157910915076630503, 9770935122131878621, 5066185753532879290},
	},
	{"V6 block 16", countingTokens(0, 47), HashOptions{BlockSize: 16},
		[]LocalHash{15310707395893867146, 15292316782987903195, 5532946206955930018},
		[]SequenceHash{15310707395893867146, 13769157705258532664, 11879827756109914528}},
	{"V7 block 64", longTokens(), HashOptions{BlockSize: 64},
		[]LocalHash{17163548555075902926, 16974263728997704987, 14518656125633126051, 4100890733601332207,
			11998708330529009958, 5306520860335538322, 10050660847748650720, 8234024938518052790,
			18401230071326500463, 9649941398452144521, 14409655878773445474, 1514052739800729068,
			17614174363997786332, 583849930527233520, 4965356426306327475, 3247951075680091763},
		[]SequenceHash{17163548555075902926, 550537054732073042, 696227494812727154, 3521146363936780775,
			13637981300452540213, 17254567972500549667, 3243138981306005472, 4230657228865966948,
			12227344206121585605, 5688479721865856225, 5664976893260870315, 9937717389053744687,
			1073433850028150196, 14325543854353187979, 600793990987818094, 17545904905838248962}},
	{"V7b block 512", longTokens(), HashOptions{BlockSize: 512},
		[]LocalHash{15260694105826141687, 13199757259649889100},
		[]SequenceHash{15260694105826141687, 14177537394800968877}},
	{"V8 partial tail", countingTokens(1, 14), HashOptions{BlockSize: 4}, baseLocal, baseSeq},
	{"V9 eagle", countingTokens(1, 12), HashOptions{BlockSize: 4, EAGLE: true},
		[]LocalHash{1914873892905420881, 1929047464662796003},
		[]SequenceHash{1914873892905420881, 13136491855314414045}},
	{"V9b eagle, one more", countingTokens(1, 13), HashOptions{BlockSize: 4, EAGLE: true},
		[]LocalHash{1914873892905420881, 1929047464662796003, 8175084615354468756},
		[]SequenceHash{1914873892905420881, 13136491855314414045, 14998081555153400732}},
	{"V10 media", countingTokens(1, 12), HashOptions{BlockSize: 4, MediaHashes: [][]uint64{nil, {0x0123456789abcdef}}},
		[]LocalHash{14643705804678351452, 209020911815014387, 483935686894639516},
		[]SequenceHash{14643705804678351452, 8170747364964978199, 567633270039543955}},
	{"V11 two media", countingTokens(1, 12), HashOptions{BlockSize: 4, MediaHashes: [][]uint64{nil, {9, 3}, {3}}},
		[]LocalHash{14643705804678351452, 9060655950894929171, 7946345801379418108},
		[]SequenceHash{14643705804678351452, 12682782579202201460, 16999758511142263137}},
	{
		"V12 empty media",
		countingTokens(1, 12),
		HashOptions{BlockSize: 4, MediaHashes: [][]uint64{nil, {}}},
		baseLocal,
		baseSeq,
	},
	{"V13 block 1", []Token{0, 1, 4294967295, 151643}, HashOptions{BlockSize: 1},
		[]LocalHash{16451421758532862321, 14426539925402682893, 3109405589439059943, 14410713464522352994},
		[]SequenceHash{16451421758532862321, 5478772005252122579, 531718070545090196, 5537143941748424553}},
	{"V14 no tokens", nil, HashOptions{BlockSize: 4}, nil, nil},
	{"no block size", countingTokens(1, 12), HashOptions{}, nil, nil},
	{"negative block size", countingTokens(1, 12), HashOptions{BlockSize: -4}, nil, nil},
	{"shorter than a block", countingTokens(1, 3), HashOptions{BlockSize: 4}, nil, nil},
	{"eagle without tokens", nil, HashOptions{BlockSize: 4, EAGLE: true}, nil, nil},
}

func TestHashVectors(t *testing.T) {
	for _, v := range hashVectors {
		t.Run(v.name, func(t *testing.T) {
			local := AppendLocalHashes(nil, v.tokens, v.o)
			if !slices.Equal(local, v.local) {
				t.Errorf("local hashes:\n got %d\nwant %d", local, v.local)
			}
			if seq := AppendSequenceHashes(nil, local); !slices.Equal(seq, v.seq) {
				t.Errorf("sequence hashes:\n got %d\nwant %d", seq, v.seq)
			}
			if n := v.o.Blocks(len(v.tokens)); n != len(v.local) {
				t.Errorf("Blocks = %d, want %d", n, len(v.local))
			}
		})
	}
}

// One machine runs only one of the two ways of hashing tokens; both must agree.
func TestHashPortable(t *testing.T) {
	for _, v := range hashVectors {
		if v.o.BlockSize < 1 || v.o.EAGLE || v.o.MediaHashes != nil {
			continue
		}
		for i, want := range v.local {
			block := v.tokens[i*v.o.BlockSize : (i+1)*v.o.BlockSize]
			if got := hashPortable(block, v.o.Salt()); got != want {
				t.Errorf("%s: block %d: got %d, want %d", v.name, i, got, want)
			}
		}
	}
}

func TestSalt(t *testing.T) {
	for _, c := range []struct {
		o    HashOptions
		want uint64
	}{
		{HashOptions{}, 1337},
		{HashOptions{LoRAName: "my-lora"}, 12827409268353072861},
		{HashOptions{CacheNamespace: "tenant-a"}, 1948188790972764086},
		{HashOptions{LoRAName: "my-lora", CacheNamespace: "tenant-a"}, 14775598059325835610},
	} {
		if got := c.o.Salt(); got != c.want {
			t.Errorf("%+v: salt %d, want %d", c.o, got, c.want)
		}
	}
}

// A chain that is continued block by block equals the chain computed at once.
func TestNextSequenceHash(t *testing.T) {
	h := FirstSequenceHash(baseLocal[0])
	for i, l := range baseLocal[1:] {
		h = NextSequenceHash(h, l)
		if h != baseSeq[i+1] {
			t.Errorf("block %d: got %d, want %d", i+1, h, baseSeq[i+1])
		}
	}
}

func TestHashingAppends(t *testing.T) {
	tokens := countingTokens(1, 12)
	local := AppendLocalHashes([]LocalHash{7}, tokens, HashOptions{BlockSize: 4})
	if want := append([]LocalHash{7}, baseLocal...); !slices.Equal(local, want) {
		t.Errorf("got %d, want %d", local, want)
	}
	seq := AppendSequenceHashes([]SequenceHash{7}, baseLocal)
	if want := append([]SequenceHash{7}, baseSeq...); !slices.Equal(seq, want) {
		t.Errorf("got %d, want %d", seq, want)
	}
}

func TestHashingDoesNotAllocate(t *testing.T) {
	tokens := longTokens()
	local := make([]LocalHash, 0, 64)
	seq := make([]SequenceHash, 0, 64)
	for _, o := range []HashOptions{
		{BlockSize: 16},
		{BlockSize: 64, LoRAName: "my-lora"},
		{BlockSize: 16, LoRAName: "my-lora", CacheNamespace: "tenant-a", MediaHashes: [][]uint64{{3, 1}, nil, {2}}},
	} {
		if n := testing.AllocsPerRun(100, func() {
			local = AppendLocalHashes(local[:0], tokens, o)
			seq = AppendSequenceHashes(seq[:0], local)
		}); n != 0 {
			t.Errorf("%+v: %v allocations, want none", o, n)
		}
	}
}

func BenchmarkHash(b *testing.B) {
	tokens := make([]Token, 8192)
	for i := range tokens {
		tokens[i] = Token(uint32(i)*2654435761) % 151936
	}
	for _, c := range []struct {
		name string
		size int
	}{{"bs16", 16}, {"bs64", 64}} {
		b.Run("local/"+c.name, func(b *testing.B) {
			var local []LocalHash
			for b.Loop() {
				local = AppendLocalHashes(local[:0], tokens, HashOptions{BlockSize: c.size})
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*len(local)), "ns/block")
		})
	}
	b.Run("sequence", func(b *testing.B) {
		local := AppendLocalHashes(nil, tokens, HashOptions{BlockSize: 16})
		var seq []SequenceHash
		for b.Loop() {
			seq = AppendSequenceHashes(seq[:0], local)
		}
		b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*len(local)), "ns/block")
	})
}
