#include "textflag.h"

// func Words(addresses *uintptr, count int)
TEXT ·Words(SB), NOSPLIT, $0-16
	MOVQ addresses+0(FP), SI
	MOVQ count+8(FP), CX
	JMP  test

next:
	MOVQ       -8(SI)(CX*8), AX
	PREFETCHT0 (AX)
	DECQ       CX

test:
	TESTQ CX, CX
	JG    next
	RET
