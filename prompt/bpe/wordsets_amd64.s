#include "go_asm.h"
#include "textflag.h"

// func cutWords(text *[windowSize + maxShort]byte, starts uint64, size int, start uint32, to *[windowSize]piece,
//	words *wordSets) int
//
// A mask keeps a piece's own bytes, of 16 from its start. The function does what cutWordsPortable does.
TEXT ·cutWords(SB), NOSPLIT, $0-56
	MOVQ text+0(FP), SI
	MOVQ starts+8(FP), BX
	MOVQ size+16(FP), R8
	MOVL start+24(FP), R9
	MOVQ to+32(FP), DI
	MOVQ words+40(FP), R10
	LEAQ ·pieceMasks(SB), R11
	MOVQ $0x2D358DCCAA6C78A5, R12 // the constants of mix2
	MOVQ $0x8BB84B93962EACC9, R13
	TESTQ BX, BX
	JZ   cut
	TZCNTQ BX, CX // see stepMerges

piece:
	// CX is where the piece starts, BX are the starts from there on. DX becomes where the next one starts.
	LEAQ    -1(BX), AX
	ANDQ    AX, BX
	XORL    DX, DX // so that BSFQ does not wait for the earlier value
	TZCNTQ  BX, DX
	TESTQ   BX, BX
	CMOVQEQ R8, DX // the last one ends with the part

	// R15 is its size; X0 its low and its key.
	MOVQ  DX, R15
	SUBQ  CX, R15
	MOVQ  R15, AX
	SHLQ  $5, AX // the size of pieceMask
	MOVOU (SI)(CX*1), X0
	MOVOU pieceMask_keepLow(R11)(AX*1), X1
	MOVOU pieceMask_addLow(R11)(AX*1), X2
	PAND  X1, X0
	POR   X2, X0
	MOVOU X0, piece_low(DI)
	ADDL  R9, CX
	MOVL  CX, piece_start(DI)
	MOVL  R15, piece_size(DI)
	MOVQ  DX, CX

	// The hash.
	MOVQ   X0, AX
	PSRLDQ $8, X0
	MOVQ   X0, DX
	XORQ   R12, AX
	XORQ   R13, DX
	MULQ   DX
	XORQ   DX, AX
	MOVQ   AX, piece_hash(DI)

	SHRQ       $(64-const_wordSetBits), AX
	SHLQ       $6, AX // the size of a set
	PREFETCHT1 (R10)(AX*1)
	ADDQ       $piece__size, DI
	TESTQ      BX, BX
	JNZ        piece

cut:
	SUBQ to+32(FP), DI
	SHRQ $5, DI // the size of piece
	MOVQ DI, ret+48(FP)
	RET

// func lookUpWordsSSE2(pieces *piece, n int, words *wordSets, ids *[idsOfFresh]kvblock.Token,
//	unknown *[maxPieces]unknownPiece) (count, missing int)
//
// There is no branch on whether a piece is a word, because it would be hard to predict.
TEXT ·lookUpWordsSSE2(SB), NOSPLIT, $0-56
	MOVQ pieces+0(FP), SI
	MOVQ n+8(FP), R8
	MOVQ words+16(FP), R10
	MOVQ ids+24(FP), DI
	MOVQ unknown+32(FP), R12
	XORL R9, R9  // index of the piece
	XORL R11, R11 // number of ids
	MOVL $1, R13

find:
	MOVOU piece_low(SI), X0
	MOVQ  piece_hash(SI), AX
	SHRQ  $(64-const_wordSetBits), AX
	SHLQ  $6, AX
	ADDQ  R10, AX

	// AX becomes the word that the piece may be, CX 0xFFFF if it is.
	MOVOU    word__size(AX), X1
	PCMPEQB  X0, X1
	PMOVMSKB X1, CX
	PCMPEQB  (AX), X0
	PMOVMSKB X0, DX
	LEAQ     word__size(AX), BX
	CMPL     CX, $0xFFFF
	CMOVQEQ  BX, AX
	CMOVLNE  DX, CX

	// An unknown piece is stored like any, and the next one overwrites it if the piece is known.
	MOVOU   word_ids(AX), X3
	MOVOU   X3, (DI)(R11*4)
	MOVL    R9, unknownPiece_piece(R12)
	MOVL    R11, unknownPiece_at(R12)
	MOVL    (word_ids+12)(AX), DX
	XORL    BX, BX
	CMPL    CX, $0xFFFF
	CMOVLNE R13, DX
	SETNE   BX
	ADDQ    DX, R11
	LEAQ    (R12)(BX*8), R12
	ADDQ    $piece__size, SI
	INCQ    R9
	CMPQ    R9, R8
	JLT     find

	SUBQ unknown+32(FP), R12
	SHRQ $3, R12 // the size of unknownPiece
	MOVQ R11, count+40(FP)
	MOVQ R12, missing+48(FP)
	RET
