#include "go_asm.h"
#include "textflag.h"

// SMALLEST makes each of a's four numbers, with signs, the smaller one of it and b's. It changes t.
#define SMALLEST(a, b, t) \
	MOVO    b, t; \
	PCMPGTL a, t; \
	PAND    t, a; \
	PANDN   b, t; \
	POR     t, a

// NEAREST makes CX the smaller one of CX and an entry minus the key in AX.
#define NEAREST(entry) \
	MOVQ    entry, R15; \
	SUBQ    AX, R15;    \
	CMPQ    R15, CX;    \
	CMOVQCS R15, CX

// func stepMerges(t *mergeTable, group *[maxGroup]smallMerge, running, done *[maxGroup]uint8, count int) int
//
// The function does what stepMergesPortable does. It branches only where the outcome is mostly the same: on whether a
// piece still merges, whether a search goes on in the next bucket, and whether a piece had more than 16 symbols. SSE2
// has no smaller one of two 32-bit numbers; SMALLEST makes it, and candidates fit into 31 bits for it.
//
// TZCNTQ takes fewer steps than BSFQ on many processors, and its result does not wait for the earlier value of its
// register. A processor without it does BSFQ instead, which has the same result, except for 0.
TEXT ·stepMerges(SB), NOSPLIT, $0-48
	MOVQ t+0(FP), DI
	MOVQ running+16(FP), R10 // where the next index is
	MOVQ R10, R11            // where the next one that still merges belongs
	MOVQ done+24(FP), R12    // where the next other one belongs
	MOVQ count+32(FP), R13
	ADDQ R10, R13
	MOVQ mergeTable_buckets(DI), R8
	MOVL $const_noRank, R9
	JMP  test

piece:
	MOVBLZX (R10), AX
	INCQ    R10
	MOVB    AX, (R11)
	MOVB    AX, (R12)
	IMULQ   $smallMerge__size, AX
	MOVQ    group+8(FP), SI
	ADDQ    AX, SI

	// X0 becomes the smallest candidate of each fourth place. The pending lookups' places have none yet.
	LEAQ  smallMerge_candidates(SI), DX
	MOVOU (DX), X0
	MOVOU 16(DX), X1
	MOVOU 32(DX), X2
	MOVOU 48(DX), X3
	SMALLEST(X0, X1, X4)
	SMALLEST(X2, X3, X5)
	SMALLEST(X0, X2, X4)
	MOVL  smallMerge_count(SI), BX
	SUBL  $const_minStride, BX
	JG    long

ranks:
	MOVQ smallMerge_pending+pendingLookup_key(SI), AX
	MOVL smallMerge_pending+pendingLookup_bucket(SI), BX

left:
	MOVQ    BX, DX
	SHLQ    $5, DX // the size of a bucket
	ADDQ    R8, DX
	MOVQ    (DX), CX
	SUBQ    AX, CX
	NEAREST(8(DX))
	NEAREST(16(DX))
	MOVQ    24(DX), DX
	NEAREST(DX)
	CMPQ    CX, mergeTable_limit(DI)
	CMOVQCC R9, CX
	SETCC   R15
	CMPQ    DX, $-1
	SETNE   DX
	TESTB   DX, R15
	JNE     nextLeft
	MOVL    smallMerge_pending+pendingLookup_place(SI), DX
	SHLL    $const_placeBits, CX
	ORL     DX, CX
	MOVL    CX, smallMerge_candidates(SI)(DX*4)
	MOVL    CX, R14

	MOVQ smallMerge_pending+pendingLookup__size+pendingLookup_key(SI), AX
	MOVL smallMerge_pending+pendingLookup__size+pendingLookup_bucket(SI), BX

right:
	MOVQ    BX, DX
	SHLQ    $5, DX
	ADDQ    R8, DX
	MOVQ    (DX), CX
	SUBQ    AX, CX
	NEAREST(8(DX))
	NEAREST(16(DX))
	MOVQ    24(DX), DX
	NEAREST(DX)
	CMPQ    CX, mergeTable_limit(DI)
	CMOVQCC R9, CX
	SETCC   R15
	CMPQ    DX, $-1
	SETNE   DX
	TESTB   DX, R15
	JNE     nextRight
	MOVL    smallMerge_pending+pendingLookup__size+pendingLookup_place(SI), DX
	SHLL    $const_placeBits, CX
	ORL     DX, CX
	MOVL    CX, smallMerge_candidates(SI)(DX*4)

	// AX becomes the next merge.
	PSHUFD  $0x4E, X0, X1
	SMALLEST(X0, X1, X4)
	PSHUFD  $0xB1, X0, X1
	SMALLEST(X0, X1, X4)
	MOVL    X0, AX
	CMPL    CX, AX
	CMOVLCS CX, AX
	CMPL    R14, AX
	CMOVLCS R14, AX
	CMPL    AX, $const_noCandidate
	JCC     finished

	// R14 becomes its place, R9 the symbols before it, DX the symbols behind the two that merge.
	MOVL   AX, CX
	MOVL   AX, R14
	ANDL   $(const_smallMergeSymbols-1), R14
	MOVQ   smallMerge_places(SI), BX
	MOVQ   $-2, DX
	SHLQ   CX, DX
	ANDQ   BX, DX
	MOVQ   $-1, R9
	SHLQ   CX, R9
	NOTQ   R9
	ANDQ   BX, R9
	TZCNTQ DX, R15 // the place that becomes empty
	BTRQ   R15, BX
	MOVQ   BX, smallMerge_places(SI)
	LEAQ   -1(DX), BX
	ANDQ   BX, DX // now without it
	MOVL   $const_noCandidate, smallMerge_candidates(SI)(R15*4)
	MOVL   $const_noCandidate, smallMerge_candidates(SI)(R14*4)

	// AX becomes the result.
	SHRL  $const_placeBits, AX
	MOVQ  mergeTable_into(DI), BX
	TESTQ BX, BX
	JNE   table
	MOVQ  mergeTable_groupBits(DI), CX
	SHRL  CX, AX

result:
	MOVL AX, smallMerge_symbols(SI)(R14*4)
	MOVL R14, smallMerge_pending+pendingLookup__size+pendingLookup_place(SI)

	// The key of the pair with the right neighbour becomes BX, and that with the left neighbour AX.
	MOVQ    mergeTable_idBits(DI), CX
	TESTQ   DX, DX
	SETEQ   R14 // no such neighbour
	TZCNTQ  DX, DX
	ANDL    $(const_smallMergeSymbols-1), DX
	MOVL    smallMerge_symbols(SI)(DX*4), DX
	MOVQ    AX, BX
	SHLQ    CX, BX
	ORQ     DX, BX
	BSRQ    R9, DX
	CMOVQEQ R15, DX // without a left neighbour, the place that became empty stays without a candidate
	MOVL    DX, smallMerge_pending+pendingLookup_place(SI)
	MOVL    $const_noCandidate, smallMerge_candidates(SI)(DX*4)
	MOVL    smallMerge_symbols(SI)(DX*4), DX
	SHLQ    CX, DX
	ORQ     DX, AX
	MOVQ    mergeTable_shift(DI), CX
	SHLQ    CX, BX
	SHLQ    CX, AX
	MOVQ    mergeTable_noPair(DI), CX
	TESTQ   R9, R9
	CMOVQEQ CX, AX
	TESTB   R14, R14
	CMOVQNE CX, BX
	MOVQ    AX, smallMerge_pending+pendingLookup_key(SI)
	MOVQ    BX, smallMerge_pending+pendingLookup__size+pendingLookup_key(SI)

	// Their buckets, by mix.
	MOVQ       $0x2D358DCCAA6C78A5, R15
	MOVQ       $0x9E3779B97F4A7C15, R14
	MOVQ       mergeTable_buckets+8(DI), CX
	DECQ       CX
	XORQ       R15, AX
	MULQ       R14
	XORQ       DX, AX
	ANDL       CX, AX
	MOVL       AX, smallMerge_pending+pendingLookup_bucket(SI)
	SHLQ       $5, AX
	PREFETCHT0 (R8)(AX*1)
	MOVQ       BX, AX
	XORQ       R15, AX
	MULQ       R14
	XORQ       DX, AX
	ANDL       CX, AX
	MOVL       AX, smallMerge_pending+pendingLookup__size+pendingLookup_bucket(SI)
	SHLQ       $5, AX
	PREFETCHT0 (R8)(AX*1)
	MOVL       $const_noRank, R9
	INCQ       R11

test:
	CMPQ R10, R13
	JNE  piece
	SUBQ running+16(FP), R11
	MOVQ R11, ret+40(FP)
	RET

finished:
	INCQ R12
	JMP  test

long:
	ADDQ  $64, DX
	MOVOU (DX), X1
	MOVOU 16(DX), X2
	SMALLEST(X0, X1, X4)
	SMALLEST(X0, X2, X5)
	MOVOU 32(DX), X1
	MOVOU 48(DX), X2
	SMALLEST(X0, X1, X4)
	SMALLEST(X0, X2, X5)
	SUBL  $const_minStride, BX
	JG    long
	JMP   ranks

table:
	MOVL (BX)(AX*4), AX
	JMP  result

nextLeft:
	INCL BX
	MOVQ mergeTable_buckets+8(DI), DX
	DECQ DX
	ANDL DX, BX
	JMP  left

nextRight:
	INCL BX
	MOVQ mergeTable_buckets+8(DI), DX
	DECQ DX
	ANDL DX, BX
	JMP  right
