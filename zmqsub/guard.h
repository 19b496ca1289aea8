// The guard looks at what libzmq reads from its connections, before libzmq does. See guard.c.
#ifndef ZMQSUB_GUARD_H
#define ZMQSUB_GUARD_H

#include <stddef.h>
#include <stdint.h>

// Why the guard ended a connection.
enum zmqsub_cut {
	ZMQSUB_CUT_NOT,
	ZMQSUB_CUT_PARTS,    // a message of too many frames
	ZMQSUB_CUT_BYTES,    // a message of too many bytes
	ZMQSUB_CUT_COMMAND,  // a ZMTP command that is too long, or goes on in another frame
	ZMQSUB_CUT_GREETING, // a peer that does not speak ZMTP 3
	ZMQSUB_CUT_BACKLOG,  // too much waits to be taken
};

// The bounds. In those of what waits, a frame counts ZMQSUB_FRAME_COST more than its bytes.
enum {
	ZMQSUB_MESSAGE_PARTS = 16,       // frames of a message; the protocols have four at most
	ZMQSUB_MESSAGE_BYTES = 16 << 20, // bytes of a message
	ZMQSUB_COMMAND_BYTES = 4 << 10,  // bytes of a command; libzmq keeps what a handshake says of the peer
	ZMQSUB_FRAME_COST = 128,         // bytes that libzmq needs for a frame beside its content

	// What comes from one address and waits to be taken. Above the first, the socket lets less in; above the second, the
	// connection is ended.
	ZMQSUB_FULL = 32 << 20,
	ZMQSUB_CUT = 128 << 20,
	// The same of what waits from all addresses: above these, the bounds of each address are the smaller ones.
	ZMQSUB_ALL_FULL = 128 << 20,
	ZMQSUB_ALL_CUT = 256 << 20,
	ZMQSUB_SMALL_FULL = 256 << 10,
	ZMQSUB_SMALL_CUT = 1 << 20,
};

// zmqsub_account counts what came from one address, and what of it was taken.
typedef struct zmqsub_account zmqsub_account;

typedef struct {
	uint64_t messages, bytes;
} zmqsub_amount;

// zmqsub_account_of returns the account of the connection that has the descriptor, NULL if the guard does not know it.
zmqsub_account *zmqsub_account_of(int fd);
// zmqsub_came returns what has come so far, in whole messages.
zmqsub_amount zmqsub_came(zmqsub_account *);
// zmqsub_took says what was taken; zmqsub_took_all, that all was of what zmqsub_came returned.
void zmqsub_took(zmqsub_account *, zmqsub_amount);
void zmqsub_took_all(zmqsub_account *, zmqsub_amount came);
// zmqsub_too_much returns how many messages wait, if they are so large that the socket should let less in; else 0.
uint64_t zmqsub_too_much(zmqsub_account *);

// zmqsub_connection returns the number of the connection that has the descriptor: each has another. 0: the guard knows none.
uint64_t zmqsub_connection(int fd);
// zmqsub_connections returns the greatest number so far.
uint64_t zmqsub_connections(void);
// zmqsub_latest_cut returns the number of the latest connection to the account's address that the guard ended, and why; 0: none.
uint64_t zmqsub_latest_cut(zmqsub_account *, enum zmqsub_cut *reason);
// zmqsub_greeted says whether the connection's greeting was seen, as far as can be told: its descriptor may belong to another by now.
int zmqsub_greeted(int fd, uint64_t connection);

#endif
