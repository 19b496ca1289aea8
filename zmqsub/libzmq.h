// Calls libzmq for libzmq.go: it receives several messages in one call from Go, and without a copy.
#ifndef ZMQSUB_LIBZMQ_H
#define ZMQSUB_LIBZMQ_H

#include <stddef.h>
#include <stdint.h>
#include <zmq.h>

#include "guard.h"

enum {
	ZMQSUB_FRAMES = 5,   // frames kept of a message; the protocols have at most four
	ZMQSUB_MESSAGES = 8, // messages that one call takes from a socket
};

typedef struct {
	void *data;
	size_t size;
} zmqsub_frame;

typedef struct {
	int frames; // at most ZMQSUB_FRAMES; the others are dropped
	zmqsub_frame frame[ZMQSUB_FRAMES];
	zmq_msg_t msg[ZMQSUB_FRAMES];
} zmqsub_message;

typedef struct {
	int messages;
	uint64_t full; // the number of waiting messages, if they are so large that the socket should read less; else 0
	zmqsub_message message[ZMQSUB_MESSAGES];
} zmqsub_batch;

// zmqsub_receive releases the messages of the batch and takes the next ones from the socket without waiting. It returns
// 0, or libzmq's error number if it took none. Then it also frees the batch, because of thousands of sockets most are
// silent.
//
// It subtracts what it took from *account. If *account is NULL, it sets it from the first message.
int zmqsub_receive(void *socket, zmqsub_batch **batch, zmqsub_account **account);

// zmqsub_free releases a batch and its messages; NULL is allowed.
void zmqsub_free(zmqsub_batch *batch);

// zmqsub_copy makes libzmq copy each message out of its 8 KiB read buffer. By default messages keep that buffer and as
// much again for reference counts, and libzmq reads the next ones into new memory. Where messages wait for a moment,
// that costs more than the copy. It returns 0, or -1 if this libzmq does not know the option.
int zmqsub_copy(void *context);

// zmqsub_trim returns free memory to the system, where the C library keeps it.
void zmqsub_trim(void);

#endif
