// Receiving through a binding that calls C for each frame and copies it takes twice the CPU. One call here takes up to
// ZMQSUB_MESSAGES messages and copies none.
#include "libzmq.h"

#include <errno.h>
#include <stdlib.h>
#ifdef __GLIBC__
#include <malloc.h>
#endif

static void release(zmqsub_message *m) {
	for (int i = 0; i < m->frames; i++)
		zmq_msg_close(&m->msg[i]);
	m->frames = 0;
}

// receive_message takes one message without waiting, and adds its size to *bytes. It returns 0 or libzmq's error number.
static int receive_message(void *socket, zmqsub_message *m, uint64_t *bytes) {
	int more = 1;
	m->frames = 0;
	while (more) {
		zmq_msg_t surplus;
		int keep = m->frames < ZMQSUB_FRAMES;
		zmq_msg_t *msg = keep ? &m->msg[m->frames] : &surplus;
		zmq_msg_init(msg);
		int error;
		do // an interrupted call does not mean that the queue is empty
			error = zmq_msg_recv(msg, socket, ZMQ_DONTWAIT) < 0 ? zmq_errno() : 0;
		while (error == EINTR);
		if (error) {
			zmq_msg_close(msg);
			release(m); // the frames of a message arrive together: only the first can be missing
			return error;
		}
		more = zmq_msg_more(msg);
		*bytes += zmq_msg_size(msg) + ZMQSUB_FRAME_COST;
		if (keep) {
			m->frame[m->frames].data = zmq_msg_data(msg);
			m->frame[m->frames].size = zmq_msg_size(msg);
			m->frames++;
		} else {
			zmq_msg_close(msg);
		}
	}
	return 0;
}

int zmqsub_receive(void *socket, zmqsub_batch **batch, zmqsub_account **account) {
	zmqsub_batch *b = *batch;
	zmqsub_amount came = {0}, took = {0};
	if (*account)
		came = zmqsub_came(*account);
	if (!b) {
		if (!(b = malloc(sizeof *b)))
			return ENOMEM;
		b->messages = 0;
		*batch = b;
	}
	for (int i = 0; i < b->messages; i++)
		release(&b->message[i]);
	b->messages = 0;
	int error = 0;
	while (b->messages < ZMQSUB_MESSAGES && !(error = receive_message(socket, &b->message[b->messages], &took.bytes)))
		b->messages++;
	if (b->messages == 0) {
		if (*account)
			zmqsub_took_all(*account, came); // also the messages that libzmq dropped, which had another topic
		free(b);
		*batch = NULL;
		return error;
	}
	if (!*account)
		*account = zmqsub_account_of(zmq_msg_get(&b->message[0].msg[0], ZMQ_SRCFD));
	b->full = 0;
	if (*account) {
		took.messages = b->messages;
		zmqsub_took(*account, took);
		b->full = zmqsub_too_much(*account);
	}
	return 0;
}

void zmqsub_free(zmqsub_batch *b) {
	if (!b)
		return;
	for (int i = 0; i < b->messages; i++)
		release(&b->message[i]);
	free(b);
}

// libzmq has ZMQ_ZERO_COPY_RECV since 4.3, but declares it only with its draft API.
int zmqsub_copy(void *context) { return zmq_ctx_set(context, 10, 0); }

void zmqsub_trim(void) {
#ifdef __GLIBC__
	malloc_trim(0);
#endif
}
