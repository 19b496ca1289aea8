#include "go_asm.h"
#include "textflag.h"

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
