// The guard checks what libzmq reads from its connections, before libzmq does. See guard.c.
#ifndef ZMQSUB_GUARD_H
#define ZMQSUB_GUARD_H

#include <stddef.h>
#include <stdint.h>

// Why the guard ended a connection.
enum zmqsub_cut {
	ZMQSUB_CUT_NOT,
	ZMQSUB_CUT_PARTS,    // a message has too many frames
	ZMQSUB_CUT_BYTES,    // a message has too many bytes
	ZMQSUB_CUT_COMMAND,  // a ZMTP command is too long, or continues in another frame
	ZMQSUB_CUT_GREETING, // the peer does not speak ZMTP 3
	ZMQSUB_CUT_BACKLOG,  // too many bytes wait for the receiver
};

// The bounds. In the bounds of waiting bytes, a frame counts ZMQSUB_FRAME_COST more than its content.
enum {
	ZMQSUB_MESSAGE_PARTS = 16,       // frames of a message; the protocols have four at most
	ZMQSUB_MESSAGE_BYTES = 16 << 20, // bytes of a message
	ZMQSUB_COMMAND_BYTES = 4 << 10,  // bytes of a command; libzmq keeps the peer's properties from the handshake
	ZMQSUB_FRAME_COST = 128,         // bytes that libzmq needs for a frame in addition to its content

	// Waiting bytes from one address. Above ZMQSUB_FULL, the socket reads less; above ZMQSUB_CUT, the guard ends the
	// connection.
	ZMQSUB_FULL = 32 << 20,
	ZMQSUB_CUT = 128 << 20,
	// Waiting bytes from all addresses. Above these, the bounds of each address are the SMALL ones.
	ZMQSUB_ALL_FULL = 128 << 20,
	ZMQSUB_ALL_CUT = 256 << 20,
	ZMQSUB_SMALL_FULL = 256 << 10,
	ZMQSUB_SMALL_CUT = 1 << 20,
};

// zmqsub_account counts the messages and bytes that came from one address, and those that the receiver took.
typedef struct zmqsub_account zmqsub_account;

typedef struct {
	uint64_t messages, bytes;
} zmqsub_amount;

// zmqsub_account_at returns the account of an IPv6 or IPv4-mapped address and a port, both in network byte order.
zmqsub_account *zmqsub_account_at(const unsigned char ip[16], const unsigned char port[2]);
// zmqsub_account_of returns the account of the latest connection with the descriptor; NULL if there was none. If libzmq has
// closed the connection that the caller means, this may be another address's account, because descriptors are reused.
zmqsub_account *zmqsub_account_of(int fd);
// zmqsub_came returns the whole messages that came so far.
zmqsub_amount zmqsub_came(zmqsub_account *);
// zmqsub_took notes what the receiver took. zmqsub_took_all notes that it took everything up to came.
void zmqsub_took(zmqsub_account *, zmqsub_amount);
void zmqsub_took_all(zmqsub_account *, zmqsub_amount came);
// zmqsub_too_much returns the number of waiting messages, if they are so large that the socket should read less; else 0.
uint64_t zmqsub_too_much(zmqsub_account *);

// zmqsub_connections returns how many connections were made. They are numbered from 1.
uint64_t zmqsub_connections(void);
// zmqsub_latest_cut returns the number of the latest connection to the account's address that the guard ended, and why;
// 0: none.
uint64_t zmqsub_latest_cut(zmqsub_account *, enum zmqsub_cut *reason);
// zmqsub_greetings returns how many connections' greetings the guard has seen to their end.
uint64_t zmqsub_greetings(void);

#endif
