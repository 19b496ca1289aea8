#include "textflag.h"

// accumulate adds one pair of lanes of a stripe to the pair of sums in acc. The lanes are at data(R9), their keys at
// key(R11). Each sum gains the other lane, and the product of the halves of its own lane combined with the key.
#define accumulate(data, key, acc) \
	MOVOU data(R9), X4 \
	MOVOU key(R11), X5 \
	PXOR X4, X5 \
	PSHUFD $0x31, X5, X6 \
	PMULULQ X5, X6 \
	PSHUFD $0x4e, X4, X4 \
	PADDQ X4, acc \
	PADDQ X6, acc

// The keys of a stripe are at words, 8 bytes further for each stripe. The keys of the last stripe are at last.
#define stripe(data, key) \
	accumulate((data+0), (key+0), X0) \
	accumulate((data+16), (key+16), X1) \
	accumulate((data+32), (key+32), X2) \
	accumulate((data+48), (key+48), X3)

// merge folds a pair of sums, combined with end(R11), into R12.
#define merge(end, acc) \
	MOVOU end(R11), X4 \
	PXOR acc, X4 \
	MOVQ X4, AX \
	PSRLDQ $8, X4 \
	MOVQ X4, CX \
	MULQ CX \
	XORQ DX, AX \
	ADDQ AX, R12

// Offsets of the fields of secret.
#define words 0
#define last 192
#define ends 256
#define sums 320

// func hashFourStripesSSE2(dst *LocalHash, tokens *Token, n int, s *secret)
TEXT ·hashFourStripesSSE2(SB), NOSPLIT, $0-32
	MOVQ dst+0(FP), R8
	MOVQ tokens+8(FP), R9
	MOVQ n+16(FP), R10
	MOVQ s+24(FP), R11
	MOVQ $0x165667919e3779f9, R13
	MOVOU (sums+0)(R11), X8
	MOVOU (sums+16)(R11), X9
	MOVOU (sums+32)(R11), X10
	MOVOU (sums+48)(R11), X11
	TESTQ R10, R10
	JLE done

block:
	MOVO X8, X0
	MOVO X9, X1
	MOVO X10, X2
	MOVO X11, X3
	stripe(0, words)
	stripe(64, (words+8))
	stripe(128, (words+16))
	stripe(192, last)
	MOVQ $0x3779b185ebca8700, R12 // 256 times the first prime
	merge((ends+0), X0)
	merge((ends+16), X1)
	merge((ends+32), X2)
	merge((ends+48), X3)
	MOVQ R12, AX
	SHRQ $37, AX
	XORQ R12, AX
	IMULQ R13, AX
	MOVQ AX, CX
	SHRQ $32, CX
	XORQ CX, AX
	MOVQ AX, (R8)
	ADDQ $8, R8
	ADDQ $256, R9
	DECQ R10
	JNZ block

done:
	RET
