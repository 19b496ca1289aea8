#include "textflag.h"

// func Words(addresses *uintptr, count int)
TEXT ·Words(SB), NOSPLIT, $0-16
	MOVD addresses+0(FP), R0
	MOVD count+8(FP), R1
	B    test

next:
	MOVD.P 8(R0), R2
	PRFM   (R2), PLDL1KEEP
	SUB    $1, R1

test:
	CMP $0, R1
	BGT next
	RET

// func Lines(address unsafe.Pointer, count int)
TEXT ·Lines(SB), NOSPLIT, $0-16
	MOVD address+0(FP), R0
	MOVD count+8(FP), R1
	B    more

line:
	PRFM (R0), PLDL1KEEP
	ADD  $64, R0
	SUB  $1, R1

more:
	CMP $0, R1
	BGT line
	RET
