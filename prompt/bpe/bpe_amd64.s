#include "go_asm.h"
#include "textflag.h"

// Without readWindow, cold text takes 3 ns a token more, and without cutWords and lookUpWordsSSE2 5 ns: 5 % and 9 % of a
// request of 8,000 tokens (BenchmarkEncodeCold of package prompt with Qwen 3's tokenizer: 15.4, 18.2 and 20.5 ns a
// token; 486 us a request). Each function has a twin in Go, for other processors and for tests.

// The constants of readWindow, each sixteen times.
DATA bytes<>+0(SB)/8, $0x2020202020202020
DATA bytes<>+8(SB)/8, $0x2020202020202020
DATA bytes<>+16(SB)/8, $0x6161616161616161
DATA bytes<>+24(SB)/8, $0x6161616161616161
DATA bytes<>+32(SB)/8, $0x4141414141414141
DATA bytes<>+40(SB)/8, $0x4141414141414141
DATA bytes<>+48(SB)/8, $0x1919191919191919
DATA bytes<>+56(SB)/8, $0x1919191919191919
DATA bytes<>+64(SB)/8, $0x3030303030303030
DATA bytes<>+72(SB)/8, $0x3030303030303030
DATA bytes<>+80(SB)/8, $0x0909090909090909
DATA bytes<>+88(SB)/8, $0x0909090909090909
DATA bytes<>+96(SB)/8, $0x0404040404040404
DATA bytes<>+104(SB)/8, $0x0404040404040404
DATA bytes<>+112(SB)/8, $0x0A0A0A0A0A0A0A0A
DATA bytes<>+120(SB)/8, $0x0A0A0A0A0A0A0A0A
DATA bytes<>+128(SB)/8, $0x0D0D0D0D0D0D0D0D
DATA bytes<>+136(SB)/8, $0x0D0D0D0D0D0D0D0D
DATA bytes<>+144(SB)/8, $0x7F7F7F7F7F7F7F7F
DATA bytes<>+152(SB)/8, $0x7F7F7F7F7F7F7F7F
GLOBL bytes<>(SB), RODATA|NOPTR, $160

// func readWindow(text *[windowSize]byte, w *window)
//
// Sixteen bytes at a time, the last ones first. A class is a comparison of all sixteen, and PMOVMSKB collects its bits.
// A byte minus the first of a range is at most the range's length minus one, as a number without a sign, if the byte is
// in the range: then the smaller of the two is the difference itself.
TEXT ·readWindow(SB), NOSPLIT, $0-16
	MOVQ  text+0(FP), SI
	MOVQ  w+8(FP), DI
	MOVOU bytes<>+0(SB), X6    // ' ', which is also the bit between upper and lower case
	MOVOU bytes<>+16(SB), X7   // 'a'
	MOVOU bytes<>+32(SB), X8   // 'A'
	MOVOU bytes<>+48(SB), X9   // 25, letters minus one
	MOVOU bytes<>+64(SB), X10  // '0'
	MOVOU bytes<>+80(SB), X11  // 9, digits minus one, and '\t'
	MOVOU bytes<>+96(SB), X12  // 4, '\t' to '\r' minus one
	MOVOU bytes<>+112(SB), X13 // '\n'
	MOVOU bytes<>+128(SB), X14 // '\r'
	MOVOU bytes<>+144(SB), X15 // 0x7F
	XORL  R8, R8               // letter
	XORL  R9, R9               // upper
	XORL  R10, R10             // number
	XORL  R11, R11             // space
	XORL  R12, R12             // newline
	XORL  R13, R13             // blank
	XORL  BX, BX               // other
	MOVQ  $48, CX

block:
	MOVOU (SI)(CX*1), X0

	// letter
	MOVO     X0, X1
	POR      X6, X1
	PSUBB    X7, X1
	MOVO     X1, X2
	PMINUB   X9, X2
	PCMPEQB  X1, X2
	PMOVMSKB X2, AX
	SHLQ     $16, R8
	ORQ      AX, R8

	// upper
	MOVO     X0, X1
	PSUBB    X8, X1
	MOVO     X1, X2
	PMINUB   X9, X2
	PCMPEQB  X1, X2
	PMOVMSKB X2, AX
	SHLQ     $16, R9
	ORQ      AX, R9

	// number
	MOVO     X0, X1
	PSUBB    X10, X1
	MOVO     X1, X2
	PMINUB   X11, X2
	PCMPEQB  X1, X2
	PMOVMSKB X2, AX
	SHLQ     $16, R10
	ORQ      AX, R10

	// newline
	MOVO     X0, X1
	PCMPEQB  X13, X1
	MOVO     X0, X2
	PCMPEQB  X14, X2
	POR      X2, X1
	PMOVMSKB X1, AX
	SHLQ     $16, R12
	ORQ      AX, R12

	// blank, space
	MOVO     X0, X3
	PCMPEQB  X6, X3
	PMOVMSKB X3, AX
	SHLQ     $16, R13
	ORQ      AX, R13
	MOVO     X0, X1
	PSUBB    X11, X1
	MOVO     X1, X2
	PMINUB   X12, X2
	PCMPEQB  X1, X2
	POR      X3, X2
	PMOVMSKB X2, AX
	SHLQ     $16, R11
	ORQ      AX, R11

	// other: as a number with a sign below ' ' and no space, or 0x7F
	MOVO     X6, X1
	PCMPGTB  X0, X1
	PANDN    X1, X2
	PCMPEQB  X15, X0
	POR      X0, X2
	PMOVMSKB X2, AX
	SHLQ     $16, BX
	ORQ      AX, BX

	SUBQ $16, CX
	JGE  block

	MOVQ R8, window_letter(DI)
	MOVQ R9, window_upper(DI)
	MOVQ R10, window_number(DI)
	MOVQ R11, window_space(DI)
	MOVQ R12, window_newline(DI)
	MOVQ R13, window_blank(DI)
	MOVQ BX, window_other(DI)
	RET

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
