#include "textflag.h"

// func Words(addresses *uintptr, count int)
TEXT ·Words(SB), NOSPLIT, $0-16
	MOVQ addresses+0(FP), SI
	MOVQ count+8(FP), CX
	JMP  test

next:
	MOVQ       (SI), AX
	PREFETCHT0 (AX)
	ADDQ       $8, SI
	DECQ       CX

test:
	TESTQ CX, CX
	JG    next
	RET

// func Lines(address unsafe.Pointer, count int)
TEXT ·Lines(SB), NOSPLIT, $0-16
	MOVQ address+0(FP), SI
	MOVQ count+8(FP), CX
	JMP  more

line:
	PREFETCHT0 (SI)
	ADDQ       $64, SI
	DECQ       CX

more:
	TESTQ CX, CX
	JG    line
	RET
