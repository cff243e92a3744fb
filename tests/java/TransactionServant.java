import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.Future;
import java.util.concurrent.TimeUnit;
import org.apache.kafka.clients.admin.AbortTransactionSpec;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.ListTransactionsOptions;
import org.apache.kafka.clients.admin.TransactionDescription;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.ConsumerRecords;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.clients.producer.RecordMetadata;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.StringDeserializer;
import org.apache.kafka.common.serialization.StringSerializer;

/**
 * Transactions of kafka-clients, told on standard input: a command a line, its fields separated by tabs. Answers with
 * lines that begin with a space, and then "ok" or "error" with the reason.
 */
public final class TransactionServant {
    private static final long TIMEOUT_S = 60;
    private static final Duration POLL = Duration.ofMillis(200);

    private final Map<String, Object> common = new HashMap<>();
    private final Map<String, KafkaProducer<String, String>> producers = new HashMap<>();
    private final BufferedReader in = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
    private final PrintStream out = new PrintStream(System.out, false, StandardCharsets.UTF_8);
    private final Admin admin;

    private TransactionServant(String bootstrap) {
        common.put("bootstrap.servers", bootstrap);
        admin = Admin.create(new HashMap<>(common));
    }

    public static void main(String[] arguments) throws Exception {
        new TransactionServant(arguments[0]).run();
    }

    private void run() throws Exception {
        for (String line = in.readLine(); line != null; line = in.readLine()) {
            try {
                obey(line.split("\t", -1));
                out.println("ok");
            } catch (Exception e) {
                Throwable cause = e instanceof ExecutionException && e.getCause() != null ? e.getCause() : e;
                out.println("error " + String.valueOf(cause).replace('\n', ' '));
            }
            out.flush();
        }
    }

    private void obey(String[] c) throws Exception {
        switch (c[0]) {
            case "open" -> open(c[1], c[2], Integer.parseInt(c[3]));
            case "begin" -> producers.get(c[1]).beginTransaction();
            case "send" -> send(producers.get(c[1]), partition(c, 2), c[4], Integer.parseInt(c[5]));
            case "commit" -> producers.get(c[1]).commitTransaction();
            case "abort" -> producers.get(c[1]).abortTransaction();
            case "close" -> producers.remove(c[1]).close(Duration.ZERO);
            case "read" -> read(partition(c, 1), c[3]);
            case "transform" -> transform(c[1], c[2], c[3], c[4], Integer.parseInt(c[5]));
            case "list" -> list(c[1]);
            case "describe" -> describe(c[1]);
            case "producers" -> describeProducers(partition(c, 1));
            case "abort-hanging" -> admin.abortTransaction(new AbortTransactionSpec(partition(c, 1),
                Long.parseLong(c[3]), Short.parseShort(c[4]), Integer.parseInt(c[5]))).all()
                .get(TIMEOUT_S, TimeUnit.SECONDS);
            case "fence" -> admin.fenceProducers(List.of(c[1])).all().get(TIMEOUT_S, TimeUnit.SECONDS);
            default -> throw new IllegalArgumentException("no command " + c[0]);
        }
    }

    private void say(Object... fields) {
        List<String> texts = new ArrayList<>();
        for (Object field : fields) {
            texts.add(String.valueOf(field));
        }
        out.println(" " + String.join("\t", texts));
    }

    private static TopicPartition partition(String[] c, int at) {
        return new TopicPartition(c[at], Integer.parseInt(c[at + 1]));
    }

    private void open(String name, String transactionalId, int timeoutMs) {
        Map<String, Object> settings = new HashMap<>(common);
        settings.put("transactional.id", transactionalId);
        settings.put("transaction.timeout.ms", timeoutMs);
        settings.put("linger.ms", 1);
        KafkaProducer<String, String> producer =
            new KafkaProducer<>(settings, new StringSerializer(), new StringSerializer());
        producers.put(name, producer);
        producer.initTransactions();
    }

    private void send(KafkaProducer<String, String> producer, TopicPartition where, String prefix, int count)
        throws Exception {
        List<Future<RecordMetadata>> sent = new ArrayList<>();
        for (int i = 0; i < count; i++) {
            sent.add(producer.send(new ProducerRecord<>(where.topic(), where.partition(), null, prefix + i)));
        }
        producer.flush();
        for (Future<RecordMetadata> future : sent) {
            future.get(TIMEOUT_S, TimeUnit.SECONDS);
        }
    }

    private KafkaConsumer<String, String> consumer(String isolation, String group) {
        Map<String, Object> settings = new HashMap<>(common);
        settings.put("isolation.level", isolation);
        settings.put("enable.auto.commit", false);
        settings.put("auto.offset.reset", "earliest");
        settings.put("fetch.max.wait.ms", 10);
        if (group != null) {
            settings.put("group.id", group);
        }
        return new KafkaConsumer<>(settings, new StringDeserializer(), new StringDeserializer());
    }

    private void read(TopicPartition where, String isolation) {
        try (KafkaConsumer<String, String> consumer = consumer(isolation, null)) {
            consumer.assign(List.of(where));
            consumer.seekToBeginning(List.of(where));
            long end = consumer.endOffsets(List.of(where)).get(where);
            while (consumer.position(where) < end) {
                consumer.poll(POLL).records(where).forEach(record -> say(record.value()));
            }
        }
    }

    /** Consume, transform, produce: each poll is one transaction, until so many records have been transformed. */
    private void transform(String name, String input, String output, String group, int count) {
        KafkaProducer<String, String> producer = producers.get(name);
        try (KafkaConsumer<String, String> consumer = consumer("read_committed", group)) {
            consumer.subscribe(List.of(input));
            int done = 0;
            while (done < count) {
                ConsumerRecords<String, String> polled = consumer.poll(POLL);
                if (polled.isEmpty()) {
                    continue;
                }
                producer.beginTransaction();
                Map<TopicPartition, OffsetAndMetadata> next = new HashMap<>();
                for (ConsumerRecord<String, String> record : polled) {
                    producer.send(new ProducerRecord<>(output, record.partition(), null, record.value() + "'"));
                    next.put(new TopicPartition(input, record.partition()),
                        new OffsetAndMetadata(record.offset() + 1));
                }
                producer.sendOffsetsToTransaction(next, consumer.groupMetadata());
                producer.commitTransaction();
                done += polled.count();
            }
        }
    }

    private void list(String pattern) throws Exception {
        ListTransactionsOptions options = new ListTransactionsOptions().filterOnTransactionalIdPattern(pattern);
        admin.listTransactions(options).all().get(TIMEOUT_S, TimeUnit.SECONDS)
            .forEach(found -> say(found.transactionalId(), found.producerId(), found.state()));
    }

    private void describe(String transactionalId) throws Exception {
        TransactionDescription found = admin.describeTransactions(List.of(transactionalId)).all()
            .get(TIMEOUT_S, TimeUnit.SECONDS).get(transactionalId);
        say(found.state(), found.producerId(), found.producerEpoch(), found.transactionTimeoutMs(),
            found.topicPartitions().size());
    }

    private void describeProducers(TopicPartition where) throws Exception {
        admin.describeProducers(List.of(where)).all().get(TIMEOUT_S, TimeUnit.SECONDS).get(where).activeProducers()
            .forEach(found -> say(found.producerId(), found.producerEpoch(), found.lastSequence(),
                found.coordinatorEpoch().orElse(-1), found.currentTransactionStartOffset().orElse(-1L)));
    }
}
